"""Ranks meet, exchange what they know of themselves, and are monitored, without any engine."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from combinations import case
from launchers import LaunchError, in_ranks

from hvd_trainer import backends
from hvd_trainer.backends import EngineOptions
from hvd_trainer.backends.engine import Engine
from hvd_trainer.backends.session import Session
from hvd_trainer.errors import PeerError


def meet(worlds: int) -> list[str]:
    """Meet several times in one process; return what the other rank has put into the store each time."""
    session, found = Session(EngineOptions()), []
    for number in range(worlds):
        session.start(Engine())
        rank = session.world.rank
        assert [peer.local_rank for peer in session.peers] == [0, 1]
        session.store.set(f"from {rank}", f"{rank} in world {number}")
        found.append(session.store.get(f"from {1 - rank}").decode())
        session.end()
        assert session.monitor is None
    assert not dist.is_initialized()
    return found


def fail_in_rank_1() -> str:
    """Return the error that each rank ends by: rank 1 fails, and rank 0 once the monitor knows of that."""
    session = Session(EngineOptions())
    session.start(Engine())
    error = ValueError("the cause") if session.world.rank == 1 else RuntimeError("the consequence")
    while session.world.is_first and session.monitor is not None and session.monitor.cause is None:
        time.sleep(0.01)
    try:
        session.end(error)
    except PeerError as peer_error:
        return str(peer_error)
    return "stands"


def outlive_sigterm() -> bool:
    """Receive, after all ranks have agreed to stop, the signal by which launchers end those that are left."""
    session = Session(EngineOptions())
    session.start(Engine())
    session.stopping = True
    os.kill(os.getpid(), signal.SIGTERM)
    session.end()
    return True


def test_ranks_that_stop_together_end_by_themselves() -> None:
    assert in_ranks(3, outlive_sigterm) == [True] * 3


def test_session_connects_ranks_without_an_engine() -> None:
    assert in_ranks(2, meet, 2) == [[f"{other} in world {number}" for number in range(2)] for other in (1, 0)]


def test_session_names_the_rank_of_the_root_cause() -> None:
    first, second = in_ranks(2, fail_in_rank_1)
    assert "stopped because rank 1 failed or ended" in first
    assert "(the consequence)" in first
    assert second == "stands"


def count_threads(numbers: list[int | None]) -> list[int]:
    """Return the CPU threads of a rank after each session, before which its program has set a number or none."""
    environ = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    session, threads = Session(EngineOptions(), environ), []
    for number in numbers:
        if number is not None:
            torch.set_num_threads(number)
        session.start(Engine())
        threads.append(torch.get_num_threads())
        session.end()
    return threads


def test_threads_that_the_program_has_set_are_kept() -> None:
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    assert in_ranks(2, count_threads, [None, None, 5]) == [[share, share, 5]] * 2


def leave_early(backend_name: str) -> None:
    """Leave with fewer exchanges than rank 0 makes, as with fewer batches."""
    with backends.create(EngineOptions(backend=backend_name)) as backend:  # type: ignore[arg-type]
        backend.collectives.barrier()
        if backend.world.is_first:
            # The first of them meets the one by which the other rank leaves.
            backend.collectives.barrier()
            backend.collectives.barrier()


@pytest.mark.parametrize("backend", [case("ddp"), case("horovod")])
def test_rank_that_left_is_blamed_for_the_exchange_that_it_did_not_make(backend: str) -> None:
    """Rank 0, whose exchange broke, was."""
    with pytest.raises(
        LaunchError, match=r"failure: rank 1 of 2 .*: came to its end, and rank 0 was in a collective"
    ):
        in_ranks(2, leave_early, backend)


def test_session_is_closed_whatever_its_engine_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its signal handlers and variables stayed in a process that went on, as a notebook does."""

    def stop(wait: bool) -> None:
        raise RuntimeError("cannot stop")

    closed: list[bool] = []
    backend = backends.create(EngineOptions(backend="single"))
    monkeypatch.setattr(backend, "stop", stop)
    backend.__enter__()
    backend.session._cleanup.callback(closed.append, True)
    with pytest.raises(RuntimeError, match="cannot stop"):
        backend.__exit__(ValueError, ValueError("the cause"), None)
    assert closed == [True]


def test_engine_is_stopped_whatever_interrupts_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while the root cause is waited for left the engine's threads and groups behind."""

    def interrupt(error: BaseException) -> None:
        raise KeyboardInterrupt

    stopped: list[bool] = []
    backend = backends.create(EngineOptions(backend="single"))
    monkeypatch.setattr(backend, "stop", lambda wait: stopped.append(wait))
    backend.__enter__()
    monkeypatch.setattr(backend.session, "_report", interrupt)
    with pytest.raises(KeyboardInterrupt):
        backend.__exit__(ValueError, ValueError("the cause"), None)
    assert stopped == [False]
    assert backend.session.monitor is None
