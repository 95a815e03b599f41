"""Buckets in host memory that the members of a process set reduce in each step, in an order that all know.

    flags      which members have joined or shut down: sent before the first bucket
    bucket 0   all-reduced
    bucket 1   ...

A member that joins or shuts down sends its flag in place of its next step, and if it has joined, buckets of zeros.
So the others' step comes to an end, and they learn that it was the schedule's last one. Nothing is negotiated. The
connections are the schedule's own: what threads ask the controller for meanwhile does not come between buckets.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from hvd_trainer.backends.buckets import Bucket, BucketExchange
from hvd_trainer.backends.session import Session
from hvd_trainer.hvd.common import wire
from hvd_trainer.hvd.common.exceptions import HorovodInternalError
from hvd_trainer.hvd.common.settings import Settings
from hvd_trainer.hvd.common.timeline import Timeline
from hvd_trainer.hvd.common.transport import CPU, Transport

T = TypeVar("T")


class Owner(Protocol):
    """The controller, as far as a schedule needs it."""

    ended: str | None
    ranks: Sequence[int]
    rank: int
    session: Session
    settings: Settings
    timeline: Timeline | None

    def fail(self, error: BaseException) -> None:
        """End all operations because of an error."""

    def waiting_for(self, titles: Collection[str]) -> AbstractContextManager[None]:
        """Mark a block as waiting for other ranks in operations."""

    def drive_to_end(self) -> None:
        """Return when operations have ended on all members, one of which shuts down."""


@dataclass(frozen=True)
class BucketSize:
    """Size of one bucket, the same on all members."""

    num_elements: int
    dtype: torch.dtype


class BucketSchedule(BucketExchange):
    """The buckets of one optimizer.

    Args:
        number: of the schedule, the same on all members.
        store: of this schedule alone.
        names: of what is in them, for reports.
    """

    def __init__(
        self,
        number: int,
        store: dist.Store,
        owner: Owner,
        *,
        sizes: Sequence[BucketSize],
        names: Sequence[str],
        op: dist.ReduceOp.RedOpType,
    ) -> None:
        self.number = number
        self._owner, self._sizes, self._names = owner, sizes, names
        self._lock = threading.Lock()
        self._works: list[Any] = []
        """of buckets that were sent, and not waited for"""
        self._num_sent = 0
        self._step = 0
        self._step_began = time.monotonic()
        self._has_left = False
        self._is_last_step = False
        # Last: `_check_wait` is called while the members connect.
        me = owner.ranks.index(owner.rank)
        self._transport = Transport(store, me, len(owner.ranks), owner.session, self._check_wait)
        self._gloo: Any = self._transport.group(CPU)
        self._options = dist.AllreduceOptions()
        self._options.reduceOp = op

    @property
    def is_over(self) -> bool:
        """Whether there is no further step, because a member has joined or operations have ended."""
        return self._has_left or self._is_last_step or self._owner.ended is not None

    def launch(self, bucket: Bucket) -> None:
        """Start to reduce the next bucket of this step, in place.

        Raises:
            HorovodInternalError: operations have ended.
        """
        with self._lock:
            if self._owner.ended is not None:
                raise HorovodInternalError(self._owner.ended)
            if not self._has_left:
                if self._num_sent == 0:
                    self._step_began = time.monotonic()
                    self._send_flags(0)
                self._send(bucket.flat)

    def _send(self, flat: Tensor) -> None:
        self._works.append(self._gloo.allreduce([flat], self._options))
        self._num_sent = (self._num_sent + 1) % len(self._sizes)

    def _send_flags(self, flags: int) -> None:
        self._transport.mesh.send(bytes([flags]))

    def wait(self, bucket: Bucket) -> None:
        """Wait until a bucket of this step is reduced.

        Raises:
            HorovodInternalError: operations have ended.
        """
        if self._has_left:
            return
        if bucket.number == 0:
            flags = self._wait_for(self._transport.mesh.receive)
            if any(row[0] & wire.SHUTDOWN for row in flags):
                self._owner.drive_to_end()
                raise HorovodInternalError(self._owner.ended)
            self._is_last_step = any(row[0] for row in flags)
        self._wait_for(lambda: self._transport.wait(self._works[bucket.number]))
        if bucket.number == len(self._sizes) - 1:
            self._works, self._step = [], self._step + 1
            timeline = self._owner.timeline
            if timeline is not None:
                timeline.add_buckets(self._names, self._step_began)

    def _wait_for(self, receive: Callable[[], T]) -> T:
        try:
            with self._owner.waiting_for(self._names):
                return receive()
        except BaseException as error:
            self._owner.fail(error)
            if not isinstance(error, Exception):
                raise
            raise HorovodInternalError(self._owner.ended) from error

    def _check_wait(self) -> None:
        if self._owner.ended is not None:
            raise HorovodInternalError(self._owner.ended)

    def leave(self, flags: int) -> None:
        """Send flags in place of the next step, and zeros if they say that this member has joined."""
        with self._lock:
            if self.is_over:
                return
            while self._num_sent:  # the rest of a step that has begun
                self._send_zeros()
            self._send_flags(flags)
            self._has_left = True
            if flags & wire.JOINED:
                for _ in self._sizes:
                    self._send_zeros()

    def _send_zeros(self) -> None:
        size = self._sizes[self._num_sent]
        self._send(torch.zeros(size.num_elements, dtype=size.dtype))

    def abort(self) -> None:
        """Break the connections."""
        self._transport.abort()

    def close(self) -> None:
        """Free the connections, after what is under way: all members have sent it."""
        for work in self._works:
            work.wait()
        self.free()

    def free(self) -> None:
        """Free the connections. The optimizer may live longer than they."""
        self._gloo = None
        self._works.clear()
        self._transport.close()


class BucketSchedules:
    """The schedules of one process set, which outlive their optimizers until all members have released them.

    Args:
        store: of this process set alone.
    """

    def __init__(self, owner: Owner, store: dist.Store) -> None:
        self._owner, self._store = owner, store
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._schedules: dict[int, BucketSchedule] = {}
        self._flags = 0
        self.released: list[int] = []
        """numbers of those that this rank's optimizers need no more, but other ranks' may"""

    def open(
        self, sizes: Sequence[BucketSize], names: Sequence[str], op: dist.ReduceOp.RedOpType
    ) -> BucketSchedule:
        """Return a new schedule, at the same time as all other members; leave it if this rank has left them."""
        number = next(self._numbers)  # all members open schedules in the same order
        store = dist.PrefixStore(f"buckets {number}", self._store)
        schedule = BucketSchedule(number, store, self._owner, sizes=sizes, names=names, op=op)
        with self._lock:
            self._schedules[number] = schedule
            flags = self._flags
        if flags:
            schedule.leave(flags)
        return schedule

    def leave(self, flags: int) -> None:
        """Leave all schedules, because this rank has joined or shuts down."""
        with self._lock:
            self._flags |= flags
            schedules = [*self._schedules.values()]
        for schedule in schedules:
            schedule.leave(flags)

    def come_back(self) -> None:
        """Begin anew after all members have joined: they have left all schedules."""
        with self._lock:
            self._flags = 0
            schedules, self._schedules = self._schedules, {}
            self.released.clear()
        for schedule in schedules.values():
            schedule.close()

    def close_released(self, numbers: Iterable[int]) -> None:
        """Free schedules that no member needs any more."""
        for number in numbers:
            # A number may come twice, in what two optimizers have sent before the first was answered.
            schedule = self._schedules.pop(number, None)
            if schedule is not None:
                self.released.remove(number)
                schedule.close()

    def release(self, number: int) -> None:
        """Note that this rank's optimizer needs a schedule no more."""
        if number in self._schedules:
            self.released.append(number)

    def close(self) -> None:
        """Free all schedules; what is under way in them is lost."""
        self.abort()
        for schedule in self._schedules.values():
            schedule.free()

    def abort(self) -> None:
        """Break the connections of all schedules."""
        for schedule in list(self._schedules.values()):
            schedule.abort()
