"""Ranks meet, exchange what they know of themselves, and are monitored, without any engine."""

from __future__ import annotations

import time

import torch.distributed as dist
from launchers import run_ranks

from hvd_trainer.backends import EngineOptions
from hvd_trainer.backends.session import Session
from hvd_trainer.errors import PeerError


def meet(worlds: int) -> tuple[int, list[str]]:
    """Meet several times in one process; return what the other rank has put into the store each time."""
    session, found = Session(EngineOptions()), []
    for number in range(worlds):
        session.connect()
        session.begin_monitoring()
        rank = session.world.rank
        assert [peer.local_rank for peer in session.peers] == [0, 1]
        session.store.set(f"from {rank}", f"{rank} in world {number}")
        found.append(session.store.get(f"from {1 - rank}").decode())
        session.finish()
        session.close()
        assert session.monitor is None
    assert not dist.is_initialized()
    return rank, found


def fail_in_rank_1() -> tuple[int, str]:
    """Return the error that each rank ends by: rank 1 fails, and rank 0 once the monitor knows of that."""
    session = Session(EngineOptions())
    session.connect()
    session.begin_monitoring()
    error = ValueError("the cause") if session.world.rank == 1 else RuntimeError("the consequence")
    while session.world.is_first and session.monitor is not None and session.monitor.cause is None:
        time.sleep(0.01)
    session.fail(error)
    session.close()
    try:
        session.raise_root_cause(error)
    except PeerError as peer_error:
        return session.world.rank, str(peer_error)
    return session.world.rank, "stands"


def test_session_connects_ranks_without_an_engine() -> None:
    assert run_ranks(meet, num_processes=2, args=(2,)) == [
        [f"{other} in world {number}" for number in range(2)] for other in (1, 0)
    ]


def test_session_names_the_rank_of_the_root_cause() -> None:
    first, second = run_ranks(fail_in_rank_1, num_processes=2)
    assert "stopped because rank 1 failed or ended" in first
    assert "(the consequence)" in first
    assert second == "stands"
