"""A job that measures how long an all-reduce takes by its size, for `diagnose`."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from hvd_trainer.backends import EngineOptions, create
from hvd_trainer.tools.doctor.all_reduce_job import all_reduce_s
from hvd_trainer.training.job import run_job

RESULT = "collectives.json"
MIN_BYTES, MAX_BYTES = 2**10, 2**24
"""Bytes of the smallest and the largest exchange."""
BUDGET_BYTES = 2**27
"""Bytes that are sent for each size: small exchanges are repeated more often."""


@dataclass(frozen=True)
class CollectivesOptions:
    """Take the time of exchanges of several sizes."""

    engine: EngineOptions = field(default_factory=EngineOptions)
    log_dir: str = "."
    """folder for the result"""


def measure(options: CollectivesOptions) -> None:
    """Measure exchanges of several sizes on all ranks; rank 0 writes pairs of bytes and seconds."""
    with create(options.engine) as backend:
        pairs = []
        size = MIN_BYTES
        while size <= MAX_BYTES:
            times = max(5, min(50, BUDGET_BYTES // size))
            pairs.append([size, all_reduce_s(backend, size, times)])
            size *= 4
        if backend.world.is_first:
            folder = Path(options.log_dir)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / RESULT).write_text(json.dumps(pairs))


if __name__ == "__main__":
    run_job(CollectivesOptions, measure)
