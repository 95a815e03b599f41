"""A rank that is stuck must not hold the others for ever: `timeout_s` bounds each exchange, on both engines."""

from __future__ import annotations

import time

import pytest
import torch
from launchers import requires, run_ranks

from hvd_trainer import EngineOptions, backends

TIMEOUT_S, STUCK_S = 3.0, 12.0


def wait_for_a_stuck_rank(backend_name: str) -> tuple[int, tuple[float, str]]:
    """Rank 1 sleeps; the other waits for it. Gives the seconds that this rank waited, and its error."""
    waited, text, rank = 0.0, "", -1
    try:
        options = EngineOptions(backend=backend_name, timeout_s=TIMEOUT_S)  # type: ignore[arg-type]
        with backends.create(options) as backend:
            rank = backend.world.rank
            backend.barrier()
            started = time.monotonic()
            try:
                if rank == 1:
                    time.sleep(STUCK_S)
                backend.all_reduce(torch.ones(3))
            finally:
                waited = time.monotonic() - started
    except Exception as error:
        text = str(error)
    return rank, (waited, text)


@pytest.mark.parametrize(
    ("backend", "launcher"),
    [("ddp", "torchrun"), pytest.param("horovod", "horovodrun", marks=requires("horovod"))],
)
def test_exchange_ends_in_time(backend: str, launcher: str) -> None:
    """Horovod's own wait has no limit, and its stall check ended nothing."""
    (waited, error), _ = run_ranks(
        wait_for_a_stuck_rank, num_processes=2, launcher=launcher, args=(backend,), timeout_s=120
    )
    assert error, "nothing was raised"
    assert TIMEOUT_S - 1 < waited < STUCK_S - 3
