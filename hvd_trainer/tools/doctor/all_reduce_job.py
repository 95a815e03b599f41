"""Add up tensors on all ranks, check the sums, and time them: the job that `doctor --run` starts.

<log-dir>/doctor.json       written by rank 0
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch

from hvd_trainer.backends import Backend, EngineOptions, create
from hvd_trainer.errors import BackendError
from hvd_trainer.training.job import run_job

RESULT = "doctor.json"
SIZES = {"all_reduce_4kb_ms": (4 * 2**10, 50), "all_reduce_4mb_ms": (4 * 2**20, 20)}
"""The size of the tensor in bytes, and the number of timed exchanges."""
NUM_WARM_UP = 5


@dataclass(frozen=True)
class AllReduceOptions:
    """Add up tensors on all ranks, check the sums, and take the time."""

    engine: EngineOptions = field(default_factory=EngineOptions)
    log_dir: str | None = None
    """folder for the result; None: it is printed"""
    began: float = field(default_factory=time.time)
    """when the launcher was started, in seconds since 1970"""


def prove(options: AllReduceOptions) -> None:
    """Check and time all-reduce on this rank; rank 0 writes the result.

    Raises:
        BackendError: a sum is wrong.
    """
    with create(options.engine) as backend:
        started_s = time.time() - options.began
        check_sum(backend)
        figures = {name: 1000 * all_reduce_s(backend, *size) for name, size in SIZES.items()}
        if backend.world.is_first:
            result = {"started_s": started_s, **figures, "engine": backend.version, "device": backend.device.type}
            _write_result(json.dumps(result), options.log_dir)


def _write_result(text: str, folder: str | None) -> None:
    if folder is None:
        print(text, flush=True)
        return
    Path(folder).mkdir(parents=True, exist_ok=True)
    (Path(folder) / RESULT).write_text(text)


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


def all_reduce_s(backend: Backend, num_bytes: int, times: int) -> float:
    """Return the median time of one all-reduce of `num_bytes` bytes of fp32, in seconds."""
    tensor = torch.ones(num_bytes // 4, device=backend.device)
    seconds = []
    for _ in range(NUM_WARM_UP + times):
        began = time.perf_counter()
        # Reading an element waits until the GPU has finished.
        float(backend.collectives.all_reduce(tensor)[0])
        seconds.append(time.perf_counter() - began)
    return median(seconds[NUM_WARM_UP:])


if __name__ == "__main__":
    run_job(AllReduceOptions, prove)
