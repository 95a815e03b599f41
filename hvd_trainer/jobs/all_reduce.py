"""Add up tensors on all ranks, check the sums, and time them by size: the job of `doctor --run` and of `diagnose`.

<log-dir>/all_reduce.json       written by rank 0
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from hvd_trainer.backends import Backend, EngineOptions, create
from hvd_trainer.errors import BackendError
from hvd_trainer.measure.command import LAUNCHER_OF, command_for
from hvd_trainer.measure.start import Start
from hvd_trainer.training.job import run_job

JOB = ("-m", "hvd_trainer.jobs.all_reduce")
RESULT = "all_reduce.json"
BUDGET_BYTES = 2**27
"""Bytes that are sent for each size: small exchanges are repeated more often."""
NUM_WARM_UP = 5
SMALL, LARGE = 4 * 2**10, 4 * 2**20


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


class AllReduceTrial(NamedTuple):
    """A trial of this job, whose figures are what rank 0 writes: `seconds` has pairs of bytes and seconds."""

    label: str
    engine: str
    ranks: int
    threads: int | None = None
    words: tuple[str, ...] = ()
    """further options of the job"""

    @property
    def identity(self) -> Mapping[str, Any]:
        return {"engine": self.engine}

    def start(self, log: Path) -> Start:
        job = [*JOB, "--backend", self.engine, *self.words, "--log-dir", str(log), "--began", str(time.time())]
        return Start(command_for(LAUNCHER_OF[self.engine], self.ranks, job), threads=self.threads)

    def read(self, log: Path) -> Mapping[str, Any] | None:
        with suppress(OSError, ValueError):
            result: Mapping[str, Any] = json.loads((log / RESULT).read_text())
            return result
        return None


def check_sum(backend: Backend) -> None:
    """Check that the sum over ranks of whole numbers, which fp32 adds exactly, is right on this rank.

    Raises:
        BackendError: the sum is wrong.
    """
    rank, ranks = backend.world.rank, backend.world.size
    numbers = torch.arange(1000.0)
    result = backend.collectives.all_reduce(numbers * (rank + 1)).cpu()
    wanted = numbers * (ranks * (ranks + 1) // 2)
    if not torch.equal(result, wanted):
        place = int((result != wanted).nonzero()[0])
        raise BackendError(
            f"{backend.version} adds up wrongly: element {place} of the sum of {ranks} ranks is {result[place]:g} "
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


if __name__ == "__main__":
    run_job(AllReduceOptions, measure_all_reduce)
