"""Operations of torch.distributed that wait for one another's names on Horovod."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hvd_trainer.backends.horovod_waiter import Waiter
from hvd_trainer.c10d.work import Completer, HorovodWork, NameQueue

NUM_PENDING = 5000
MAX_CALLS = 150
"""Calls of functions for an operation, from its start to its end; with the completion of a future, too."""


class Engine:
    """A Horovod that has completed the operations up to a number, and refuses one."""

    def __init__(self) -> None:
        self.completed, self.refused = 0, 0
        self.begun: list[int] = []
        library = SimpleNamespace(horovod_torch_wait_done=lambda seen, limit_s: 0)
        hvd: Any = SimpleNamespace(
            poll=lambda handle: handle <= self.completed,
            synchronize=lambda handle: handle,
            mpi_ops=SimpleNamespace(mpi_lib=library),
        )
        self.waiter = Waiter(hvd, 9)
        self.completer = Completer(self.waiter)
        self.emptied: list[NameQueue] = []
        self.queue = NameQueue("sum", self.emptied.append)

    def start(self, number: int, timeout_s: float = 1800.0) -> HorovodWork:
        def begin(name: str) -> list[int]:
            if number == self.refused:
                raise ValueError("it is refused")
            self.begun.append(number)
            return [number]

        results: list[int] = []
        work = HorovodWork(
            self.queue,
            self.waiter,
            self.completer,
            group="0",
            number=number,
            ranks=(0, 1),
            call=f"sum {number}",
            begin=begin,
            finish=results.extend,
            result=results,
            device=torch.device("cpu"),
            timeout_s=timeout_s,
            where="here",
        )
        work.start()
        return work


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine()
    yield engine
    engine.completed = 10**9
    engine.completer.close()


@contextmanager
def counted_calls(limit: float) -> Iterator[None]:
    """Fail if this thread calls more functions than that."""
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(None)
    assert calls <= limit, f"{calls} calls"


@pytest.mark.parametrize("with_futures", [False, True])
def test_each_of_many_pending_operations_costs_the_same(with_futures: bool, engine: Engine) -> None:
    """The 700th of a name was a RecursionError, and each asked all that came before it."""
    with counted_calls(NUM_PENDING * MAX_CALLS):
        works = [engine.start(number) for number in range(1, NUM_PENDING + 1)]
        futures = [work.get_future() for work in works] if with_futures else []
        assert not works[-1].is_completed()
        assert engine.begun == [1], "two of one name are under way"
        engine.completed = NUM_PENDING
        assert works[-1].wait()
        assert all(work.is_success() for work in works)
    assert [work.result() for work in works] == [[number] for number in range(1, NUM_PENDING + 1)]
    assert engine.emptied == [engine.queue]
    for number, future in enumerate(futures, 1):
        assert future.wait() == [number]


def test_operations_behind_one_that_is_late_have_time_limits_too(engine: Engine) -> None:
    """Horovod still has the tensors of the first one: the others of its name cannot begin before it is done."""
    futures = [
        engine.start(number, timeout_s).get_future() for number, timeout_s in ((1, 0.3), (2, 0.1), (3, 1800))
    ]
    for number, timeout_s in ((2, "0.1"), (1, "0.3")):
        with pytest.raises(RuntimeError, match=rf"sum {number} here: Timed out after {timeout_s} s"):
            futures[number - 1].wait()
    assert engine.begun == [1]
    engine.completed = 3
    assert futures[2].wait() == [3]
    assert engine.begun == [1, 3]


def test_operations_behind_one_that_fails_are_carried_out(engine: Engine) -> None:
    engine.refused = 2
    works = [engine.start(number) for number in (1, 2, 3)]
    engine.completed = 3
    assert works[2].wait()
    assert works[0].is_success()
    with pytest.raises(dist.DistBackendError, match="sum 2 here failed: it is refused"):
        works[1].wait()
    assert engine.begun == [1, 3]
