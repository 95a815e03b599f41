"""What a check works with: commands with time limits, and ranks on hosts of their own names."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import secrets
import shlex
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from child_environment import child_environment
from digits_job import free_port
from job import Job, LaunchTimeoutError

from benchmarks import NO_GPUS

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent
MARK = f"gpu-test-{secrets.token_hex(8)}"
NCCL_IN_ONE_HOST = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_MNNVL_ENABLE": "0"}
LEAST_S = 5.0
"""With less time left, no command is begun."""
MNIST = ("-m", "hvd_trainer.mnist", "--dataset", "digits")
IMDB = ("-m", "hvd_trainer.imdb", "--dataset", "synthetic")
REPRODUCIBLE = ("--reproducible", "4", "--batch-size", "32", "--max-steps", "20")
_LOCK = threading.Lock()
_FOUND: dict[str, str] = {}
"""What several checks want to know, and only one has to find out."""
HELP = ("-m", "hvd_trainer.mnist", "--help-all")
DETERMINISTIC = (
    "-c",
    "import runpy, sys, torch; torch.use_deterministic_algorithms(True); sys.argv = sys.argv[1:]; "
    "runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)",
    "hvd_trainer.mnist",
    *MNIST[2:],
)
"""MNIST by kernels that give the same bits in every run; the exchange is that of a training without options."""
HOROVOD_HAS = ("-c", "import horovod.torch as hvd; print('nccl', bool(hvd.nccl_built()))")


class MissingError(Exception):
    """This machine lacks what the check needs; the text says what."""


class FailedError(Exception):
    """The check has found a fault."""


@dataclass(frozen=True)
class Ran:
    """A command that has ended, or was ended at its limit."""

    command: str
    code: int | None
    """None: it had not ended at its limit"""
    seconds: float
    output: str
    ended_at: float
    """by `time.time`"""


@dataclass(frozen=True)
class Check:
    """One thing to prove or to measure.

    Args:
        name: what it shows, unique in its stage.
        prove: called with a bench and `args`; return figures, or raise `FailedError` or `MissingError`.
        args: the check's own case, where several checks share `prove`.
        needs: what it cannot do without, as in `Bench.lacks`.
        measures: its figures have no limit, so that they prove nothing.
    """

    name: str
    prove: Callable[..., dict[str, Any] | None]
    args: tuple[Any, ...] = ()
    needs: tuple[str, ...] = ()
    measures: bool = False


@dataclass(frozen=True)
class Bench:
    """One check's view of the machine.

    Args:
        device: `cuda` or `cpu`: where everything is run.
        gpus: how many devices there are; on the CPU, as many ranks as stand for them.
        data_dir: MNIST's folder, or None.
        work: a folder for what the commands write.
        until: when the stage's time is over, by `time.monotonic`.
        ran: the commands of this check.
    """

    device: str
    gpus: int
    data_dir: Path | None
    work: Path
    until: float = 0.0
    ran: list[Ran] = field(default_factory=list)

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"

    def folder(self, name: str) -> str:
        """Return a new folder's path, for --log-dir."""
        return str(self.work / f"{name.replace(' ', '-')}-{secrets.token_hex(4)}")

    def lacks(self, need: str) -> str | None:
        """Return what is missing of a need: `gpu`, `N gpus`, `horovod`, `mnist`, an option, a Python package."""
        if need == "gpu":
            return None if self.on_gpu else "a GPU"
        if need.endswith(" gpus"):
            enough = self.gpus >= int(need.split()[0])
            return None if enough else f"{need.replace('gpus', 'GPUs')} (here: {self.gpus})"
        if need == "mnist":
            return None if self.data_dir else "MNIST: --data-dir FOLDER"
        if need == "horovod":
            return self._lacks_horovod()
        if need.startswith("--"):
            return None if need in self._printed_by(HELP) else f"an hvd_trainer with the option {need}"
        return None if importlib.util.find_spec(need) else f"the Python package {need}"

    def _lacks_horovod(self) -> str | None:
        printed = self._printed_by(HOROVOD_HAS)
        if not printed:
            return "Horovod: python -m hvd_trainer install-horovod"
        if self.on_gpu and "nccl True" not in printed:
            return "a Horovod with NCCL: python -m hvd_trainer install-horovod --gpu nccl"
        return None

    def forget_horovod(self) -> None:
        """Look anew at the next check: another one is installed."""
        _FOUND.pop(str(HOROVOD_HAS), None)

    def _printed_by(self, argv: tuple[str, ...]) -> str:
        """Return what a command prints, once for all checks; nothing if it fails."""
        if str(argv) not in _FOUND:
            asked = self.run(*argv, limit_s=60)
            _FOUND[str(argv)] = asked.output if asked.code == 0 else ""
        return _FOUND[str(argv)]

    def judge(self, good: bool, why: str) -> None:
        """Raise `FailedError` unless a figure of a GPU is good; the CPU's own is no measure of it."""
        if self.on_gpu and not good:
            raise FailedError(why)

    # Commands.

    def run(
        self, *argv: str, env: Mapping[str, str | None] | None = None, limit_s: float = 90.0, program: str = ""
    ) -> Ran:
        """Run `python ARGV`, or another program; return how it ended."""
        with ExitStack() as stack:
            job = self._start(stack, [program or sys.executable, *argv], dict(env or {}), self._new_folder())
            return self._wait([job], limit_s)[0]

    def ok(self, *argv: str, **more: Any) -> Ran:
        """Run it as `run` does; raise `FailedError` unless it ended well."""
        return require_success(self.run(*argv, **more))

    def torchrun(
        self, ranks: int, *argv: str, limit_s: float = 120.0, env: Mapping[str, str] | None = None
    ) -> Ran:
        """Run so many ranks by torchrun; raise `FailedError` unless they ended well."""
        launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
        return self.ok(*launcher, *argv, limit_s=limit_s, env=env)

    def ranks(
        self,
        *argv: str,
        size: int = 2,
        own_hosts: bool = True,
        limit_s: float = 100.0,
        env: Mapping[str, str] | None = None,
        waits_for: Sequence[int] | None = None,
    ) -> list[Ran]:
        """Run ranks that are started by hand; return how each ended.

        Args:
            own_hosts: give each rank a host name of its own, so that NCCL lets them share a GPU (see own_host.py).
            waits_for: these ranks' end ends the others; None: all ranks'.
        """
        port = free_port()
        with ExitStack() as stack:
            # Ranks of one host meet in a file of its temporary folder.
            jobs, shared = [], self._new_folder()
            for rank in range(size):
                place = ("0", "1") if own_hosts else (str(rank), str(size))
                variables = {
                    **{"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": place[0]},
                    **{"LOCAL_WORLD_SIZE": place[1], "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
                    **(NCCL_IN_ONE_HOST if own_hosts else {}),
                    **(env or {}),
                }
                on_host = [str(HERE / "own_host.py"), f"n{rank}"] if own_hosts else []
                jobs.append(self._start(stack, [sys.executable, *on_host, *argv], dict(variables), shared))
            return self._wait(jobs, limit_s, waits_for)

    def two_ranks(self, *argv: str, **more: Any) -> str:
        """Run two ranks as `ranks` does; return what the first printed, once both have ended well."""
        ran = self.ranks(*argv, **more)
        # The one that ended first tells more than the one that missed it.
        for its in sorted(ran, key=lambda its: its.ended_at):
            require_success(its)
        return ran[0].output

    def _new_folder(self) -> Path:
        folder = self.work / f"job-{secrets.token_hex(4)}"
        folder.mkdir()
        return folder

    def _start(
        self, stack: ExitStack, command: list[str], env: dict[str, str | None], temporary: Path
    ) -> tuple[Job, float]:
        if self.until - time.monotonic() < LEAST_S:
            raise MissingError("more time: the stage's was over")
        folder = self._new_folder()
        mark = f"{MARK}/{folder.name}"
        paths = [str(REPOSITORY), str(HERE.parent), str(HERE.parent / "support"), os.environ.get("PYTHONPATH", "")]
        changes = {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "PYTHONUNBUFFERED": "1",
            **({} if self.on_gpu else NO_GPUS),
            **env,
        }
        environ = child_environment(os.environ, changes, mark=mark, folder=temporary)
        job = Job(command, command[1:], mark=mark, folder=folder, env=environ, cwd=REPOSITORY)
        stack.callback(job.destroy)
        return job, time.time()

    def _wait(
        self, jobs: list[tuple[Job, float]], limit_s: float, waits_for: Sequence[int] | None = None
    ) -> list[Ran]:
        # Limits are for what computes on a GPU.
        deadline = min(time.monotonic() + limit_s * (1 if self.on_gpu else 4), self.until)
        needed = set(range(len(jobs)) if waits_for is None else waits_for)
        ended: dict[int, float] = {}
        while needed - ended.keys() and time.monotonic() < deadline:
            time.sleep(0.02)
            for number, (job, _) in enumerate(jobs):
                if number not in ended and job.popen.poll() is not None:
                    ended[number] = time.time()
        found = [self._ran(job, began, ended.get(number)) for number, (job, began) in enumerate(jobs)]
        self.ran.extend(found)
        if needed - ended.keys() and deadline == self.until:
            raise MissingError("more time: the stage's was over")
        return found

    def _ran(self, job: Job, began: float, ended: float | None) -> Ran:
        overdue, now = "", time.time()
        if ended is None:
            try:
                job.wait(0.1)
            except LaunchTimeoutError as error:
                overdue = f"\n{error}"
        output = f"{job.stdout}{job.stderr}{overdue}"
        code = None if ended is None else job.popen.returncode
        return Ran(shlex.join(job.popen.args), code, (ended or now) - began, output, ended or now)  # type: ignore[arg-type]

    # Weights.

    def reference(self) -> str:
        """Return the digest of what one process trains in reproducible mode, which all others must train, too."""
        with _LOCK:
            if "digest" not in _FOUND:
                _FOUND["digest"] = self.train_reproducibly()
            return _FOUND["digest"]

    def train_reproducibly(self) -> str:
        """Train in one process; return its weights' digest."""
        log_dir = self.folder("single")
        self.ok(*MNIST, *REPRODUCIBLE, "--backend", "single", "--device", self.device, "--log-dir", log_dir)
        return digest(log_dir)


def require_success(ran: Ran) -> Ran:
    """Return it.

    Raises:
        FailedError: it did not end, or with another exit code than 0.
    """
    if ran.code != 0:
        how = f"had not ended after {ran.seconds:.0f} s" if ran.code is None else f"ended with {ran.code}"
        lines = [line for line in ran.output.strip().splitlines() if line.strip()]
        raise FailedError(f"{how}: {lines[-1] if lines else 'it printed nothing'}")
    return ran


def digest(log_dir: str) -> str:
    """Return the SHA-256 of a run's final weights."""
    file = Path(log_dir) / "model.safetensors"
    if not file.exists():
        raise FailedError(f"no weights in {file}")
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


def records(log_dir: str, event: str) -> list[dict[str, Any]]:
    """Return the lines of a run's metrics.jsonl of that event.

    Raises:
        FailedError: there is none.
    """
    lines = (Path(log_dir) / "metrics.jsonl").read_text().splitlines()
    found = [its for its in map(json.loads, lines) if its["event"] == event]
    if not found:
        raise FailedError(f"no {event} in {log_dir}/metrics.jsonl")
    return found


def figures_in(output: str) -> dict[str, Any]:
    """Return the JSON of the last line that is an object."""
    lines = [line for line in output.splitlines() if line.startswith("{")]
    if not lines:
        raise FailedError("it printed no figures")
    figures: dict[str, Any] = json.loads(lines[-1])
    return figures
