"""A barrier that names the ranks that do not come."""

from __future__ import annotations

import time
from datetime import timedelta

import torch.distributed as dist

PAUSE_S = 0.01
"""How long to sleep between two questions. A wait of the store's own that ends at its time limit spoils the
connection to it."""
PASSED, FAILED = "passed", "failed"


def monitored_barrier(
    store: dist.Store, rank: int, size: int, timeout: timedelta, *, wait_all_ranks: bool
) -> None:
    """Wait for all ranks.

    Args:
        store: of this barrier alone.
        rank: this process's; rank 0 waits for the others.
        timeout: how long the ranks may take.
        wait_all_ranks: whether rank 0 names all ranks that are missing, instead of the first one.

    Raises:
        torch.distributed.DistBackendError: a rank did not come in time.
    """
    limit_ms = round(timeout.total_seconds() * 1000)
    if rank:
        store.set(str(rank), "")
        missing = _missing(store, ["result"], timeout)
        if missing or store.get("result").decode() == FAILED:
            raise dist.DistBackendError(
                f"Rank {rank} successfully reached monitoredBarrier, but received errors while waiting for "
                f"send/recv from rank 0: {'it did not come' if missing else 'other ranks did not come'} in "
                f"{limit_ms} ms."
            )
        return
    missing = _missing(store, [str(other) for other in range(1, size)], timeout)
    store.set("result", FAILED if missing else PASSED)
    if missing:
        named = f"Ranks {', '.join(missing)}" if wait_all_ranks and missing[1:] else f"Rank {missing[0]}"
        raise dist.DistBackendError(
            f"Rank 0 timed out in monitoredBarrier: {named} failed to pass monitoredBarrier in {limit_ms} ms."
        )


def _missing(store: dist.Store, keys: list[str], timeout: timedelta) -> list[str]:
    """Return the keys that are not in the store in time."""
    deadline = time.monotonic() + timeout.total_seconds()
    while keys := [key for key in keys if not store.check([key])]:
        if time.monotonic() > deadline:
            break
        time.sleep(PAUSE_S)
    return keys
