"""Add up tensors on all ranks, check the sums, and time them by size: the job of `doctor --run` and of `diagnose`.

<log-dir>/all_reduce.json       written by rank 0
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

from hvd_trainer.backends import Backend, EngineOptions, create
from hvd_trainer.errors import BackendError, OptionError
from hvd_trainer.horovod_build.facts import Facts
from hvd_trainer.tools.doctor.findings import Finding, error, ok
from hvd_trainer.tools.runner.command import LAUNCHER_OF, command_for
from hvd_trainer.tools.runner.machine import threads_per_rank
from hvd_trainer.tools.runner.runs import Start
from hvd_trainer.tools.runner.trial_runner import JobTrial, TrialRunner
from hvd_trainer.training.job import run_job
from hvd_trainer.utils.text import INSTALL_HOROVOD

JOB = ("-m", "hvd_trainer.tools.doctor.all_reduce")
RESULT = "all_reduce.json"
BUDGET_BYTES = 2**27
"""Bytes that are sent for each size: small exchanges are repeated more often."""
NUM_WARM_UP = 5
SMALL, LARGE = 4 * 2**10, 4 * 2**20
RANKS, RUN_TIMEOUT_S = 2, 120.0


@dataclass(frozen=True)
class AllReduceOptions:
    """Add up tensors on all ranks, check the sums, and take the time."""

    engine: EngineOptions = field(default_factory=EngineOptions)
    sizes: tuple[int, ...] = (SMALL, LARGE)
    """bytes of the tensors"""
    log_dir: str | None = None
    """folder for the result; None: it is printed"""
    began: float = field(default_factory=time.time)
    """when the launcher was started, in seconds since 1970"""


def measure_all_reduce(options: AllReduceOptions) -> None:
    """Check and time all-reduce on this rank; rank 0 writes the result.

    Raises:
        BackendError: a sum is wrong.
    """
    with create(options.engine) as backend:
        started_s = time.time() - options.began
        check_sum(backend)
        seconds = [[size, all_reduce_s(backend, size)] for size in options.sizes]
        if backend.world.is_first:
            names = {"engine": backend.version, "device": backend.device.type}
            text = json.dumps({"started_s": started_s, "seconds": seconds, **names})
            if options.log_dir is None:
                print(text, flush=True)
            else:
                Path(options.log_dir).mkdir(parents=True, exist_ok=True)
                (Path(options.log_dir) / RESULT).write_text(text)


def read_result(folder: Path) -> Mapping[str, Any] | None:
    """Return the result that rank 0 wrote, `seconds` as pairs of bytes and seconds; None if it wrote none."""
    with suppress(OSError, ValueError):
        result: Mapping[str, Any] = json.loads((folder / RESULT).read_text())
        return result
    return None


def check_sum(backend: Backend) -> None:
    """Check that the sum over ranks of whole numbers, which fp32 adds exactly, is right on this rank.

    Raises:
        BackendError: the sum is wrong.
    """
    rank, ranks = backend.world.rank, backend.world.size
    numbers = torch.arange(1000.0)
    found = backend.collectives.all_reduce(numbers * (rank + 1)).cpu()
    wanted = numbers * (ranks * (ranks + 1) // 2)
    if not torch.equal(found, wanted):
        place = int((found != wanted).nonzero()[0])
        raise BackendError(
            f"{backend.version} adds up wrongly: element {place} of the sum of {ranks} ranks is {found[place]:g} "
            f"instead of {wanted[place]:g}"
        )


def all_reduce_s(backend: Backend, num_bytes: int) -> float:
    """Return the median time of one all-reduce of `num_bytes` bytes of fp32, in seconds."""
    tensor = torch.ones(num_bytes // 4, device=backend.device)
    seconds = []
    for _ in range(NUM_WARM_UP + max(5, min(50, BUDGET_BYTES // num_bytes))):
        began = time.perf_counter()
        # Reading an element waits until the GPU has finished.
        float(backend.collectives.all_reduce(tensor)[0])
        seconds.append(time.perf_counter() - began)
    return median(seconds[NUM_WARM_UP:])


def engines(facts: Facts) -> list[str]:
    """Return the names of the installed engines, whether they work or not."""
    if facts.torch.error is not None:
        return []
    return ["ddp"] if facts.horovod is None else ["ddp", "horovod"]


def device_of(facts: Facts, engine: str) -> str:
    """Return the device type on which two ranks of an engine can run: NCCL refuses two on one GPU, and a
    Horovod built for CPUs has no GPU at all.
    """
    on_cpu_only = engine == "horovod" and facts.horovod is not None and not facts.horovod.record.get("cuda")
    return "cpu" if on_cpu_only or len(facts.torch.gpus) < RANKS else facts.torch.kind or "cpu"


def prove_engine(engine: str, device: str) -> Finding:
    """Start the job with two ranks on an engine, as a user would, and return a finding about it."""
    name, launcher = f"run {engine}", LAUNCHER_OF[engine]
    job = [*JOB, "--backend", engine, "--device", device]

    def start(log: Path) -> Start:
        words = [*job, "--log-dir", str(log), "--began", str(time.time())]
        return Start(command_for(launcher, RANKS, words), threads=threads_per_rank(RANKS))

    with tempfile.TemporaryDirectory(prefix="hvd_trainer-doctor-") as folder:
        try:
            trial = JobTrial(name, {"engine": engine}, start, read_result)
            run = TrialRunner(Path(folder), limit_s=RUN_TIMEOUT_S).run(trial)
        except OptionError:
            return error(name, f"there is no {launcher} here", f"{INSTALL_HOROVOD} --force")
    if run.state != "done":
        note = f"no end after {RUN_TIMEOUT_S:g} s" if run.seconds >= RUN_TIMEOUT_S else run.note
        two = "-np 2 python" if launcher == "horovodrun" else "--standalone --nproc-per-node 2"
        remedy = f"{launcher} {two} {' '.join(job)}    (prints all of it)"
        return error(name, f"{RANKS} ranks by {launcher} failed: {note}", remedy)
    started_s, seconds = float(run.figures["started_s"]), dict(run.figures["seconds"])
    small_ms, large_ms, gb_per_s = 1000 * seconds[SMALL], 1000 * seconds[LARGE], LARGE / 1e9 / seconds[LARGE]
    figures = {"all_reduce_4kb_ms": small_ms, "all_reduce_4mb_ms": large_ms, "gb_per_s": gb_per_s}
    return ok(
        name,
        f"{RANKS} ranks by {launcher}, {run.figures['engine']}: sums are right; 4 kB in {small_ms:.2f} ms, "
        f"4 MB in {large_ms:.1f} ms ({gb_per_s:.1f} GB/s); started in {started_s:.1f} s",
        **{key: round(value, 4) for key, value in {"started_s": started_s, **figures}.items()},
    )


if __name__ == "__main__":
    run_job(AllReduceOptions, measure_all_reduce)
