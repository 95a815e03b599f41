"""Agrees with the other members of a process set on what to do next, and does it.

Members meet in rounds. In a round each says what it newly asks for (`wire`), and all compute the same responses
from the rows (`matching`), which they carry out in the same order (`executor`). A member comes to a round whenever
it has an unfinished operation; one that has none computes on, and the others wait for its row asleep.

    submit      puts a request into the queue
    wait        the waiting thread itself drives rounds until its request is done: no thread has to be woken
    the thread  drives rounds for requests that nobody waits for, and ends its rest when there are some

Small tensors travel with the rows. Then one round is all that an allreduce needs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from hvd_trainer.backends.session import Session
from hvd_trainer.faults.collectives import CollectiveCall
from hvd_trainer.hvd.common import wire
from hvd_trainer.hvd.common.exceptions import HorovodInternalError
from hvd_trainer.hvd.common.executor import Executor
from hvd_trainer.hvd.common.launch_order import LaunchOrder
from hvd_trainer.hvd.common.matching import Matcher, Response
from hvd_trainer.hvd.common.request import MAX_NUMBER, NUMBER_BITS, Request
from hvd_trainer.hvd.common.settings import Settings
from hvd_trainer.hvd.common.timeline import Timeline
from hvd_trainer.hvd.common.transport import Transport
from hvd_trainer.utils import accelerator
from hvd_trainer.utils.threads import start_thread

logger = logging.getLogger(__name__)

DUPLICATE_NAME = (
    "An operation with the name {name} is under way on this rank already. Wait for it first, or use another name."
)
SHUT_DOWN = (
    "Horovod has been shut down: {who} called hvd.shutdown() or came to its end, while this rank asked for an "
    "operation. If it ended by an exception, its own output says why."
)
LINGER_S = 0.1
"""How long the thread looks for requests again and again after the last one, so that submitting wakes nobody."""
PATIENCE_S = 0.02
"""How long, after that, it leaves requests to those who said that they would wait soon."""
DOZE_S = 5.0
"""How long after the last request only another one wakes it."""
MAX_IDLE_CYCLES = 5
"""While ranks wait for each other's requests, rounds are up to so many cycle times apart."""
MAX_POLLS = 20
"""After so many cycles in which another thread drives, the thread sleeps until it is woken."""
MAX_IDLE_ROUNDS = 200
"""After so many rounds without a response (about a second), different operations under one name are a mistake, if
all members wait for theirs: one that does not may yet ask for the others'."""


class Controller:
    """One process set, of which this process is a member.

    Args:
        set_id: the same on all ranks.
        store: of this set alone.
        ranks: global ranks of the members, in order.
        settings: the same on all ranks.
        order: of this rank's process sets.

    Attributes:
        ended: why no operation succeeds any more; None as long as they do.
        shut_down_by: the ranks that had come to a shutdown when that has ended operations.
        timeline: records operations; None: nothing does.
        num_joins: how often all members have joined.
    """

    def __init__(
        self,
        set_id: int,
        store: dist.Store,
        ranks: Sequence[int],
        settings: Settings,
        session: Session,
        order: LaunchOrder,
    ) -> None:
        self.ranks, self.rank, self.settings, self.session = ranks, session.world.rank, settings, session
        self.ended: str | None = None
        self.shut_down_by: list[int] = []
        self.timeline: Timeline | None = None
        self.num_joins = 0
        me = ranks.index(self.rank)
        self._matcher = Matcher(ranks)
        self._state = threading.Condition()
        self._queue: list[Request] = []
        """submitted, and not yet told the others"""
        self._open: dict[tuple[str, int], Request] = {}
        """submitted, and not done"""
        self._started: set[Request] = set()
        """of which a thread waits for the work"""
        self._numbers: dict[str, int] = {}
        self._is_driving = False
        self._num_waiting = 0
        self._idle_rounds = 0
        self._num_rounds = 0
        self._num_done = 0
        self._waits: set[str] = set()
        """what this rank waits for without a request, for as long as it takes"""
        self._flags = 0
        self._last_joined = -1
        self._work = threading.Event()
        self._is_asleep = True
        self._thread: threading.Thread | None = None
        # Last: `_check_wait` is called while the members connect.
        self._transport = Transport(store, me, len(ranks), session, self._check_wait)
        self._executor = Executor(self._transport, ranks, settings.fusion_bytes, order)
        self._set_id, self._order = set_id, order

    # Called by the user's threads.

    def submit(self, request: Request, *, will_wait: bool = False, waits_soon: bool = False) -> None:
        """Ask for an operation.

        Args:
            will_wait: the caller calls `wait` at once, so that the thread need not care for it.
            waits_soon: the caller calls `wait` soon, so that the thread need not hurry.

        Raises:
            ValueError: an operation of this name is under way.
            HorovodInternalError: operations have ended.
        """
        with self._state:
            if self.ended is not None:
                raise HorovodInternalError(self.ended)
            if request.key in self._open:
                raise ValueError(DUPLICATE_NAME.format(name=request.signature.name))
            self._open[request.key] = request
            self._queue.append(request)
        request.waits_soon = waits_soon
        if not will_wait and (not waits_soon or self._is_asleep):
            self._wake_thread()

    def run(self, request: Request) -> Any:
        """Ask for an operation without tensors, and return its result when it is done.

        Raises:
            ValueError, HorovodInternalError: as `submit`, or the operation has failed.
        """
        self.submit(request, will_wait=True)
        self.wait(request)
        if request.error is not None:
            raise request.error
        return request.result

    def next_number(self, kind: str) -> int:
        """Return the number of a request that has no name, counted for each kind of operation.

        Ranks that joined have counted fewer than the others: all begin anew after it, in another range.
        """
        with self._state:
            count = self._numbers[kind] = self._numbers.get(kind, 0) % MAX_NUMBER + 1
            return (self.num_joins % 256 << NUMBER_BITS) + count

    def wait(self, request: Request) -> None:
        """Return when a request is done, with or without an error."""
        if not request.is_done:
            request.is_awaited = True
            with self.session.activity.waiting():
                self._drive_until(lambda: request.is_done)
        if request.work is not None:
            self._finish_work(request)

    def _finish_work(self, request: Request) -> None:
        work, request.work = request.work, None
        self._started.add(request)
        try:
            with self.session.activity.waiting():
                self._transport.wait(work)
        except BaseException as error:
            self.fail(error)
            if not isinstance(error, Exception):
                raise
            request.error = HorovodInternalError(self.ended)
            request.error.__cause__ = error
        finally:
            self._started.discard(request)
        if self.timeline is not None:
            self.timeline.add_operations([request])

    @contextmanager
    def waiting_for(self, title: str) -> Iterator[None]:
        """Mark the block as waiting for other ranks, in what has no request, for as long as they want."""
        self._waits = {*self._waits, title}
        try:
            with self.session.activity.waiting():
                yield
        finally:
            self._waits = self._waits - {title}

    def calls(self) -> list[CollectiveCall]:
        """Return the operations under way, and the last one that was done, for reports of who waits for whom."""
        group = f"hvd:{','.join(map(str, self.ranks))}"
        joined = [self.ranks[member] for member in list(self._matcher.joined)]
        ranks = tuple(rank for rank in self.ranks if rank not in joined)
        open_requests = [*list(self._open.values()), *list(self._started)]
        under_way = dict.fromkeys(self._waits, 0.0) | {
            request.title: request.submitted_at for request in open_requests
        }
        last = CollectiveCall(group, self._num_done, "", True)
        return [
            last,
            *(CollectiveCall(group, 0, title, False, ranks, True, since) for title, since in under_way.items()),
        ]

    def join(self, device: torch.device) -> int:
        """Take part in the others' operations until all have joined; return the rank that came last.

        Args:
            device: where this rank makes zeros for operations on an accelerator.

        Raises:
            HorovodInternalError: operations have ended.
        """
        with self._state:
            self._executor.join_device = device
            if self.ended is not None:
                raise HorovodInternalError(self.ended)
            self._flags |= wire.JOINED | (wire.ZEROS_ON_HOST if accelerator.is_host(device) else 0)
        with self.waiting_for("join"):
            self._drive_until(lambda: not self._flags & wire.JOINED)
        if self.ended is not None:
            raise HorovodInternalError(self.ended)
        return self._last_joined

    def shutdown(self) -> None:
        """Return when all members have come to a shutdown, or operations have ended; then free everything."""
        with self._state:
            self._flags |= wire.SHUTDOWN
        with self.waiting_for("shutdown"):
            self._drive_until(lambda: self.ended is not None)
        self._stop_thread()
        self._transport.close()

    def abort(self, reason: str) -> None:
        """End all operations, also those under way, without the other members."""
        self._end(reason)
        self._transport.abort()
        self._stop_thread()

    def fail(self, error: BaseException) -> None:
        """End all operations because an exchange has failed."""
        if self.ended is None:
            self._end(f"An exchange with the other ranks failed: {error}", error)
            self._transport.abort()  # the others must not wait for this rank

    def _stop_thread(self) -> None:
        self._work.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(1.0)

    def _drive_until(self, is_done: Callable[[], bool]) -> None:
        """Drive rounds until a condition holds, or wait while another thread does."""
        while True:
            with self._state:
                self._num_waiting += 1
                while not is_done() and self._is_driving and self.ended is None:
                    self._state.wait()
                self._num_waiting -= 1
                if is_done() or self.ended is not None:
                    return
                self._is_driving = True
            self._drive_once()

    # The thread for requests that nobody waits for.

    def _wake_thread(self) -> None:
        if self._thread is None:
            with self._state:
                if self._thread is None:
                    self._thread = start_thread(self._run, "horovod")
        if not self._work.is_set():
            self._work.set()

    def _run(self) -> None:
        idle_since = time.monotonic()
        polls = 0
        while self.ended is None:
            if self._work.wait(None if self._is_asleep else PATIENCE_S):
                if self._is_asleep:
                    self._is_asleep, idle_since = False, time.monotonic()
                time.sleep(self.settings.cycle_s)
            if self._open:
                with self._state:
                    if not all(request.waits_soon for request in self._open.values()):
                        idle_since = time.monotonic()
                polls = polls + 1 if self._is_driving else 0
                with self._state:
                    if polls > MAX_POLLS:
                        self._num_waiting += 1
                        self._state.wait_for(lambda: not self._is_driving)
                        self._num_waiting -= 1
                    if self._is_driving or self.ended is not None or not self._open:
                        continue
                    self._is_driving = True
                self._drive_once()
            idle_s = time.monotonic() - idle_since
            if idle_s > LINGER_S:
                self._work.clear()
            if idle_s > DOZE_S:
                self._is_asleep = True
                if self._open:  # by one who took the thread for awake
                    self._work.set()

    # Called by the one thread that drives.

    def _drive_once(self) -> None:
        try:
            self._pace()
            self._round()
        except BaseException as error:
            self.fail(error)
            if not isinstance(error, Exception):
                raise
        finally:
            with self._state:
                self._is_driving = False
                if self._num_waiting:
                    self._state.notify_all()

    def _pace(self) -> None:
        """Wait after a round without a response, in which all members wait for requests of each other."""
        if self._idle_rounds and not self._queue:
            time.sleep(self.settings.cycle_s * min(self._idle_rounds, MAX_IDLE_CYCLES))

    def _round(self) -> None:
        with self._state:
            requests = self._queue[: wire.MAX_REQUESTS]
            conflicts = self._matcher.conflicts() if self._idle_rounds >= MAX_IDLE_ROUNDS else []
            own = [self._open.get(entry.key) for entries in conflicts for entry in entries]
            is_blocked = bool(conflicts) and all(request.is_awaited for request in own if request is not None)
            message = wire.write(requests, self._flags | (wire.BLOCKED if is_blocked else 0))
            del self._queue[: len(requests)]
        self._num_rounds += 1
        if self.timeline is not None:
            self.timeline.add_cycle()
        messages = self._transport.mesh.all_gather(message)
        flags = [wire.read(member, message, self._matcher) for member, message in enumerate(messages)]
        if any(flags):
            self._note_joined({member: bits for member, bits in enumerate(flags) if bits & wire.JOINED})
        if all(bits & wire.BLOCKED for bits in flags):
            for entries in conflicts:
                self._matcher.refuse(entries)
        responses = self._matcher.take_responses()
        to_exchange: list[Response] = []
        done: list[Request] = []
        began_at = time.monotonic()
        for response in responses:
            request = response.request = self._open.get(response.key)
            if response.error is not None:
                self._finish(request, HorovodInternalError(response.error))
                continue
            if request is not None and request.action is not None:
                request.result = request.action(response.signatures)
            elif response.is_inline:
                assert request is not None
                self._executor.compute(response, request)
            else:
                to_exchange.append(response)
            if request is not None:
                request.began_at = began_at
                done.append(request)
        if to_exchange:
            with self._turn(to_exchange):
                self._executor.run(to_exchange)
        if responses and logger.isEnabledFor(logging.DEBUG):
            names = (f"{response.signature.name}: {response.error or 'done'}" for response in responses)
            logger.debug("round %d: %s", self._num_rounds, ", ".join(names))
        if self.timeline is not None:
            self.timeline.add_operations([request for request in done if request.work is None])
        for request in done:
            self._finish(request)
        self._num_done += len(responses)
        if responses:
            self.session.activity.advance()
        self._idle_rounds = 0 if responses else self._idle_rounds + 1
        self._end_round(flags)

    def _turn(self, responses: Sequence[Response]) -> AbstractContextManager[None]:
        """Return the context in which exchanges may begin: on an accelerator in the order of all process sets."""
        if all(response.signature.device in ("", "cpu") for response in responses):
            return nullcontext()
        return self._order.turn(self._set_id, self._greatest, self._check_wait)

    def _greatest(self, number: int) -> int:
        """Return the greatest of the members' numbers. A collective."""
        messages = self._transport.mesh.all_gather(number.to_bytes(8, "big"))
        return max(int.from_bytes(message, "big") for message in messages)

    def _note_joined(self, flags: Mapping[int, int]) -> None:
        """Note who has joined, with the flags of each; if all have, end their `join`."""
        for member, bits in flags.items():
            if member not in self._matcher.joined:
                self._matcher.join(member, has_device=not bits & wire.ZEROS_ON_HOST)
                self._last_joined = self.ranks[member]
        if len(self._matcher.joined) == len(self.ranks):
            self._matcher.joined.clear()
            with self._state:
                self._flags &= ~(wire.JOINED | wire.ZEROS_ON_HOST)
                self.num_joins += 1
                self._numbers.clear()

    def _end_round(self, flags: Sequence[int]) -> None:
        """Act on who has joined or shuts down."""
        shut = [self.ranks[member] for member, bits in enumerate(flags) if bits & wire.SHUTDOWN]
        if shut:
            self.shut_down_by = shut
            self._end(SHUT_DOWN.format(who=f"rank {shut[0]}"))

    def _finish(self, request: Request | None, error: HorovodInternalError | None = None) -> None:
        if request is None:  # this rank has joined
            return
        with self._state:
            del self._open[request.key]
            request.error = error
            request.is_done = True

    def _end(self, reason: str, cause: BaseException | None = None) -> None:
        """Let all unfinished and further operations fail."""
        with self._state:
            if self.ended is None:
                self.ended = reason
            for request in self._open.values():
                request.error = HorovodInternalError(self.ended)
                request.error.__cause__ = cause
                request.is_done = True
            self._open.clear()
            self._queue.clear()
            self._work.set()
            self._state.notify_all()

    def _check_wait(self) -> None:
        """Give up waiting for another rank if operations have ended meanwhile."""
        if self.ended is not None:
            raise HorovodInternalError(self.ended)
