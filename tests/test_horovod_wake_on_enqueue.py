"""In the Horovod that we build, an enqueued tensor ends the pause between two cycles."""

from __future__ import annotations

import os
import time

import torch
from launchers import requires, run_ranks

from hvd_trainer import EngineOptions, backends

CYCLE_S, EXCHANGES = 1.0, 20


def exchange(cycle_time_ms: float | None) -> tuple[int, tuple[float, str | None]]:
    """Return the rank, the seconds that the exchanges took, and HOROVOD_CYCLE_TIME afterwards."""
    with backends.create(EngineOptions(backend="horovod", cycle_time_ms=cycle_time_ms)) as backend:
        backend.collectives.barrier()
        started = time.monotonic()
        for _ in range(EXCHANGES):
            backend.collectives.all_reduce(torch.ones(3))
        return backend.world.rank, (time.monotonic() - started, os.environ.get("HOROVOD_CYCLE_TIME"))


@requires("horovod")
def test_wake_on_enqueue_ends_the_pause() -> None:
    """As published, 20 exchanges in cycles of 1 s take 20 s. A variable that the user sets is kept."""
    asked = {"HOROVOD_WAKE_ON_ENQUEUE": "1", "HOROVOD_CYCLE_TIME": str(1000 * CYCLE_S)}
    for seconds, cycle in run_ranks(exchange, num_processes=2, launcher="horovodrun", args=(None,), env=asked):
        assert seconds < EXCHANGES * CYCLE_S / 3
        assert cycle == "1000.0"


@requires("horovod")
def test_cycle_time_option_is_kept() -> None:
    for seconds, cycle in run_ranks(exchange, num_processes=2, launcher="horovodrun", args=(100.0,)):
        assert seconds > (EXCHANGES - 2) * 0.1
        assert cycle is None
