"""The jobs and who does them. A contestant is one row: a name, a launcher, a command."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass
from typing import Any, Literal

from hvd_trainer.backends.horovod_start import build_record

Engine = Literal["horovod", "ddp", "single"]


@dataclass(frozen=True)
class Job:
    """The work that every contestant of one table does, once per run.

    ``samples`` is the number in the epoch, ``batch`` the samples per rank and step. Of an epoch the
    first ``warmup`` steps are not timed. ``baseline`` and ``floor`` name the contestants that the
    others are divided by.
    """

    name: str
    samples: int
    batch: int
    warmup: int
    baseline: str
    floor: str
    max_steps: int | None = None
    """that end a job whose steps, and not its samples, are counted; None: one epoch"""

    def per_rank(self, ranks: int) -> int:
        """Samples of one rank in the epoch, with those repeated to make the ranks equal."""
        return math.ceil(self.samples / ranks)

    def steps(self, ranks: int) -> int:
        """Optimizer steps in the epoch; the last batch may be smaller."""
        return self.max_steps or math.ceil(self.per_rank(ranks) / self.batch)

    @property
    def figure(self) -> str:
        """Of a step, by which contestants are divided: steps of hardly any arithmetic scatter much."""
        return "step_p50_s" if self.max_steps else "step_s"

    def timed_samples(self, ranks: int) -> int:
        """Samples of one rank in the steps that are timed."""
        return self.per_rank(ranks) - self.warmup * self.batch


ENGINES: tuple[Engine, ...] = ("single", "ddp", "horovod")
HOROVOD_ON_MPI = "Horovod by install-horovod --mpi"


@dataclass(frozen=True)
class Contestant:
    """One way to do a job.

    ``engine`` says what starts it; that of one process takes part on one rank alone. ``arguments`` follow
    ``python``; in them ``{data}`` is the data folder and ``{folder}`` a folder of the run's own. ``against`` names
    contestants of the same job that it is divided by, besides the job's baseline and floor.
    """

    name: str
    job: Job
    engine: Engine
    arguments: str
    against: tuple[str, ...] = ()
    needs: str | None = None
    """the package that must be installed, for a peer, or `HOROVOD_ON_MPI`"""

    @property
    def is_here(self) -> bool:
        """Whether it can be run."""
        if self.needs is None:
            return True
        if self.needs == HOROVOD_ON_MPI:
            return bool(build_record().get("mpi"))
        package = self.needs.partition(".")[0]
        return importlib.util.find_spec(package) is not None and importlib.util.find_spec(self.needs) is not None


MNIST = Job("MNIST CNN", 60_000, 128, warmup=10, baseline="raw DDP", floor="compute floor")
SCRIPTS = Job("MNIST CNN, plain scripts", 60_000, 128, warmup=10, baseline="plain_ddp.py", floor="plain_ddp.py")
IMAGES = Job("images in files", 20_000, 64, warmup=10, baseline="DataLoader", floor="DataLoader, bytes")
TOKENS = Job("tokens in mapped files", 31_992, 64, warmup=10, baseline="DataLoader", floor="DataLoader")
RESNET = Job("ResNet-18, 32x32", 2_560, 32, warmup=5, baseline="raw DDP", floor="without exchange")

_OURS = (
    "-m hvd_trainer.mnist --epochs 1 --batch-size 128 --optimizer adam --lr 1e-4 "
    "--dataset mnist --data-dir {data} --log-dir {folder}/log"
)

_GROWING = {
    "ranks": (("8x8 numbers in memory", 1_000, ""),),
    "tensors": tuple((f"{n:,} tensors", 10**5, f" --tensors {n}") for n in (10, 100, 1_000, 10_000)),
    "samples": tuple((f"{n:,} samples", n, " --tensors 20") for n in (10, 10**4, 10**5, 10**6, 10**7, 10**8)),
}
"""By what grows: the jobs' names, their samples, and their options. The steps have hardly any arithmetic."""


def _growing(name: str, samples: int, options: str) -> Job:
    """A job whose steps are counted, as so short an epoch may have one only."""
    max_steps = 30 if "10000" in options else 200
    return Job(name, samples, 8, warmup=10, baseline="by hand, ddp", floor="by hand, ddp", max_steps=max_steps)


_GROWN = {what: {_growing(*case): case[2] for case in cases} for what, cases in _GROWING.items()}
JOBS: dict[str, tuple[Job, ...]] = {
    **{"mnist": (MNIST,), "scripts": (SCRIPTS,), "resnet18": (RESNET,), "images": (IMAGES,), "tokens": (TOKENS,)},
    **{what: tuple(jobs) for what, jobs in _GROWN.items()},
}
"""By names on the command line."""

GROWTH = tuple(
    Contestant(
        f"{name}, {engine}",
        job,
        engine,
        f"-m benchmarks.ours.growing --loop {loop} --backend {engine} --samples {job.samples} "
        f"--steps {job.max_steps}{options}" + (f" --data {{data}}/numbers/{job.samples}" if options else ""),
        against=() if loop == "hand" else (f"by hand, {engine}",),
    )
    for jobs in _GROWN.values()
    for job, options in jobs.items()
    for engine in ENGINES
    for name, loop in (("by hand", "hand"), ("hvd_trainer", "trainer"))
    if engine != "single" or not options
)

# Scripts for one engine, on the other.
_ON_DDP = "-m hvd_trainer run --backend ddp --"
_ON_HOROVOD = "-m hvd_trainer run --backend horovod --"
_PLAIN = "examples/mnist/plain_{engine}.py --data-dir {{data}}"
_PLAIN_DDP, _PLAIN_HOROVOD = (_PLAIN.format(engine=engine) for engine in ("ddp", "horovod"))

# By package: the scripts of benchmarks/peers, on the engines that they have.
_PEERS = {
    "Accelerate": ("accelerate", "ddp", "with_accelerate"),
    "Fabric": ("lightning_fabric", "ddp", "with_fabric"),
    "Ignite ddp": ("ignite", "ddp", "with_ignite --engine gloo"),
    "Ignite horovod": ("ignite", "horovod", "with_ignite --engine horovod"),
}
PEERS = tuple(
    Contestant(name, job, engine, f"-m benchmarks.peers.{script} {options}", needs=package)
    for job, options in ((MNIST, "--job mnist --data-dir {data}"), (RESNET, "--job resnet18"))
    for name, (package, engine, script) in _PEERS.items()
)

_RAW_LOADING = "-m benchmarks.raw.loading --data-dir {{data}} --kind {} --loader {}"
_OUR_LOADING = "-m benchmarks.ours.loading --data-dir {{data}} --kind {} --backend {}"
LOADERS = tuple(
    Contestant(name, job, engine, command.format(kind, option), against=against, needs=package or reader)
    for job, kind, against, reader in (
        (IMAGES, "images", ("DALI", "torchdata, bytes"), "torchcodec"),
        (TOKENS, "tokens", ("torchdata",), None),
    )
    for name, engine, command, option, package in (
        ("DataLoader", "ddp", _RAW_LOADING, "DataLoader", None),
        ("DataLoader, bytes", "ddp", _RAW_LOADING, "DataLoader --pixels", None),
        ("torchdata", "ddp", _RAW_LOADING, "torchdata", "torchdata"),
        ("torchdata, bytes", "ddp", _RAW_LOADING, "torchdata --pixels", "torchdata"),
        ("DALI", "ddp", _RAW_LOADING, "DALI", "nvidia.dali"),
        ("hvd_trainer ddp", "ddp", _OUR_LOADING, "ddp", None),
        ("hvd_trainer horovod", "horovod", _OUR_LOADING, "horovod", None),
        ("hvd_trainer ddp, DALI", "ddp", _OUR_LOADING, "ddp --dali", "nvidia.dali"),
        ("hvd_trainer horovod, DALI", "horovod", _OUR_LOADING, "horovod --dali", "nvidia.dali"),
    )
    if job is IMAGES or not name.endswith(("bytes", "DALI"))
)

_RAW, _DATA, _HAND = "-m benchmarks.raw", "--data-dir {data}", "-m benchmarks.ours.by_hand"
_OUR_RESNET, _FLOOR = "-m benchmarks.ours.resnet --backend", "floor with exchange"
_BY_HAND: dict[Job, tuple[tuple[Any, ...], ...]] = {
    MNIST: (
        ("raw DDP", "ddp", f"{_RAW}.ddp {_DATA}"),
        ("raw Horovod", "horovod", f"{_RAW}.horovod {_DATA}"),
        ("raw DDP, 2 workers", "ddp", f"{_RAW}.ddp {_DATA} --workers 2"),
        ("raw Horovod, 2 workers", "horovod", f"{_RAW}.horovod {_DATA} --workers 2"),
        ("in-memory DDP", "ddp", f"{_RAW}.memory_ddp {_DATA}"),
        ("in-memory Horovod", "horovod", f"{_RAW}.memory_horovod {_DATA}"),
        ("in-memory Horovod, 1 group", "horovod", f"{_RAW}.memory_horovod {_DATA} --num-groups 1"),
        ("our ddp, loop by hand", "ddp", f"{_HAND} {_DATA} --backend ddp"),
        ("our horovod, loop by hand", "horovod", f"{_HAND} {_DATA} --backend horovod"),
        ("hvd_trainer ddp", "ddp", f"{_OURS} --backend ddp", ("our ddp, loop by hand", _FLOOR)),
        (
            "hvd_trainer horovod",
            "horovod",
            f"{_OURS} --backend horovod",
            ("our horovod, loop by hand", "raw Horovod", "hvd_trainer ddp", _FLOOR),
        ),
        (
            "hvd_trainer horovod, MPI",
            "horovod",
            f"{_OURS} --backend horovod --transport mpi",
            ("hvd_trainer horovod", _FLOOR),
            HOROVOD_ON_MPI,
        ),
        ("compute floor", "ddp", f"{_RAW}.floor {_DATA}"),
        (_FLOOR, "ddp", f"{_RAW}.floor {_DATA} --exchange"),
    ),
    SCRIPTS: (
        ("plain_ddp.py", "ddp", _PLAIN_DDP),
        ("plain_horovod.py", "horovod", _PLAIN_HOROVOD),
        ("plain_horovod.py on ddp", "ddp", f"{_ON_DDP} {_PLAIN_HOROVOD}", ("plain_horovod.py",)),
        ("plain_ddp.py on horovod", "horovod", f"{_ON_HOROVOD} {_PLAIN_DDP}", ("plain_horovod.py",)),
    ),
    RESNET: (
        ("raw Horovod's script on ddp", "ddp", f"{_ON_DDP} {_RAW}.resnet_horovod", ("raw Horovod",)),
        ("raw DDP's script on horovod", "horovod", f"{_ON_HOROVOD} {_RAW}.resnet_ddp", ("raw Horovod",)),
        ("raw DDP", "ddp", f"{_RAW}.resnet_ddp"),
        ("raw Horovod", "horovod", f"{_RAW}.resnet_horovod"),
        ("hvd_trainer ddp", "ddp", f"{_OUR_RESNET} ddp"),
        ("hvd_trainer horovod", "horovod", f"{_OUR_RESNET} horovod", ("raw Horovod",)),
        (
            "hvd_trainer horovod, MPI",
            "horovod",
            f"{_OUR_RESNET} horovod --transport mpi",
            ("hvd_trainer horovod",),
            HOROVOD_ON_MPI,
        ),
    ),
}
"""By jobs: name, engine, arguments, and what it is divided by and needs, if anything."""
CONTESTANTS = (
    *(Contestant(name, job, *row) for job, rows in _BY_HAND.items() for name, *row in rows),
    *PEERS,
    *LOADERS,
    *GROWTH,
    Contestant("without exchange", RESNET, "ddp", f"{_RAW}.resnet_floor"),
)
