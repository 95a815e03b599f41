"""How long an exchange takes on this machine, by its size: ranks that add up tensors, for `diagnose`."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from hvd_trainer.backends import EngineOptions, create
from hvd_trainer.tools.doctor.all_reduce_job import all_reduce_s
from hvd_trainer.training.job import run_job

RESULT = "collectives.json"
SMALLEST, LARGEST = 2**10, 2**24
"""Bytes."""
BUDGET_BYTES = 2**27
"""Sent for one size: small ones are sent more often."""


@dataclass(frozen=True)
class CollectivesOptions:
    """Take the time of exchanges of several sizes."""

    engine: EngineOptions = field(default_factory=EngineOptions)
    log_dir: str = "."
    """folder for the result"""


def measure(options: CollectivesOptions) -> None:
    """Runs in each rank; rank 0 writes pairs of bytes and seconds."""
    with create(options.engine) as backend:
        pairs = []
        size = SMALLEST
        while size <= LARGEST:
            times = max(5, min(50, BUDGET_BYTES // size))
            pairs.append([size, all_reduce_s(backend, size, times)])
            size *= 4
        if backend.world.is_first:
            folder = Path(options.log_dir)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / RESULT).write_text(json.dumps(pairs))


if __name__ == "__main__":
    run_job(CollectivesOptions, measure)
