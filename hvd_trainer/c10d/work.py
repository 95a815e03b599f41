"""Operations under way: `dist.Work`, the queue of those of one name, and the thread that completes futures."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hvd_trainer.backends.horovod_waiter import Waiter
from hvd_trainer.errors import first_line
from hvd_trainer.faults.collectives import CollectiveCall
from hvd_trainer.utils import accelerator
from hvd_trainer.utils.tensors import tensors_in
from hvd_trainer.utils.threads import start_thread

NO_TIMEOUT = timedelta(0)
Future = torch.futures.Future


class NameQueue:
    """The operations of one name, of which Horovod carries out one at a time, in the order of their calls.

    Whoever asks for one of them, in whichever thread, finishes those that are done and begins the next one.

    Args:
        on_empty: called with this queue when Horovod is through with all of them.
    """

    def __init__(self, name: str, on_empty: Callable[[NameQueue], None]) -> None:
        self.name, self._on_empty = name, on_empty
        self.works: deque[HorovodWork] = deque()
        self.lock = threading.Lock()
        self.ended: list[HorovodWork] = []
        """whose futures are not yet completed"""
        self._first_deadline = math.inf

    def add(self, work: HorovodWork) -> None:
        """Add an operation, which `advance` begins."""
        self.works.append(work)

    @property
    def is_busy(self) -> bool:
        """Whether operations are under way, or their futures not yet completed."""
        return bool(self.works or self.ended)

    def advance(self) -> None:
        """Finish the operations that are done, and begin the next one."""
        with self.lock:
            if not self.works:
                return
            while self.works and self.works[0].proceed():
                self.works.popleft()
            if not self.works:
                self._on_empty(self)

    def limit(self, deadline: float) -> None:
        """Let `take_ended` look for operations that are late from a time on."""
        with self.lock:
            self._first_deadline = min(self._first_deadline, deadline)

    def take_ended(self) -> list[HorovodWork]:
        """Return the operations that are done and whose futures are to be completed; fail those that are late."""
        self.advance()
        now = time.monotonic()
        with self.lock:
            if now > self._first_deadline:
                for work in self.works:
                    work.fail_if_late(now)
                self._first_deadline = min((w.deadline for w in self.works if not w.is_done), default=math.inf)
            ended, self.ended = self.ended, []
        return ended


class HorovodWork(dist._Work):
    """A collective of torch.distributed under way, as Horovod carries it out.

    It advances when somebody asks for it: `wait` and `is_completed` in the caller's thread, and `Completer` once
    there is a future. So an operation that is waited for at once costs no change of threads.

    Args:
        queue: of its name, by which ranks match it.
        number: among those of the group, of these ranks.
        call: what was called, with which tensors; alike on all ranks.
        begin: hands the tensors to Horovod under a name, and returns its handles.
        finish: puts what Horovod returned for the handles in its place.
        result: of `result`, and of the future.
        after: operations, begun before, that are done before this one is.
        device: of the tensors.
        where: it was called, for errors.
    """

    def __init__(
        self,
        queue: NameQueue,
        waiter: Waiter,
        completer: Completer,
        *,
        group: str,
        number: int,
        ranks: tuple[int, ...],
        call: str,
        begin: Callable[[str], list[int]],
        finish: Callable[[list[Any]], None],
        result: Any = None,
        after: Sequence[HorovodWork] = (),
        device: torch.device,
        timeout_s: float,
        where: str,
    ) -> None:
        super().__init__()
        self._queue, self._waiter, self._completer = queue, waiter, completer
        self.group, self.number, self.ranks, self.call = group, number, ranks, call
        self.description = f"{call} {where}"
        self._begin: Callable[[str], list[int]] | None = begin
        self._finish: Callable[[list[Any]], None] | None = finish
        self._result, self._after, self._timeout_s = result, after, timeout_s
        self.deadline = time.monotonic() + timeout_s
        self._handles: list[int] | None = None
        self._received: list[Any] = []
        self._error: Exception | None = None
        self.is_done = False
        """whether it is known to be done; asks nobody"""
        self._promise: Future[None] | None = None
        self._future: Future[Any] | None = None
        self._is_future_done = False
        # All that is done with the tensors is queued there, whichever thread does it.
        self._stream = None if accelerator.is_host(device) else torch.accelerator.current_stream(device)
        self._finished: accelerator.Point | None = None
        queue.add(self)

    def start(self) -> None:
        """Begin the operation, at once or when those of its name that came before are done."""
        if not self.advance() and self._handles is None:
            self._leave_to_completer()  # the other ranks may need it before anybody here waits for it

    def record(self, *, is_done: bool) -> CollectiveCall:
        """Return what the monitor is told."""
        text = f"{self.call}, number {self.number} of group {self.group}"
        return CollectiveCall(f"horovod:{self.group}", self.number, text, is_done, self.ranks)

    def advance(self) -> bool:
        """Finish the operation if its results are there; return whether it is done."""
        if not self.is_done:
            self._queue.advance()
        return self.is_done

    def proceed(self) -> bool:
        """Begin the operation, or finish it if its results are there; return whether its name is free again.

        Horovod still has the tensors of an operation that has failed because it was late.
        """
        try:
            with nullcontext() if self._stream is None else accelerator.on_stream(self._stream):
                if self._handles is None:
                    assert self._begin is not None
                    self._handles = self._begin(self._queue.name)
                while self._handles:
                    if not self._waiter.is_done(self._handles[0]):
                        return False
                    self._received.append(self._waiter.take(self._handles.pop(0)))
                for work in self._after:
                    if not work.advance():
                        return False
                    if work._error is not None:
                        raise work._error
                if not self.is_done:
                    self._put_in_place()
        except Exception as error:  # in whichever thread it occurs, it is for who waits
            self._handles = []
            if not self.is_done:
                self._fail(error)
        return True

    def _put_in_place(self) -> None:
        assert self._finish is not None
        self._finish(self._received)
        if self._stream is not None:
            self._finished = accelerator.Point(self._stream.device)
        self._end()

    def _fail(self, error: Exception) -> None:
        late = isinstance(error, TimeoutError)
        self._error = dist.DistBackendError(
            str(error) if late else f"{self.description} failed: {first_line(error)}"
        )
        self._error.__cause__ = error
        self._end()

    def _end(self) -> None:
        """Let go of the tensors that are not the result."""
        self.is_done = True
        self._begin = self._finish = None
        self._received, self._after = [], ()
        self._handles = self._handles or []
        if self._promise is not None:
            self._queue.ended.append(self)

    def fail_if_late(self, now: float) -> None:
        """Let the operation fail if it has taken longer than its time limit."""
        if not self.is_done and now > self.deadline:
            self._fail(TimeoutError(self._timeout_text(self._timeout_s)))

    def _leave_to_completer(self) -> None:
        self._queue.limit(self.deadline)
        self._completer.add(self._queue)
        # The completer may be waiting for Horovod, and what this waits for may have happened before `add`.
        if self.advance():
            self.complete_future()

    def _timeout_text(self, timeout_s: float) -> str:
        return (
            f"{self.description}: Timed out after {timeout_s:g} s: other ranks have not called it, or with other "
            f"shapes or types, or one is gone."
        )

    def complete_future(self) -> None:
        """Complete the future, if there is one, of an operation that is done; its callbacks run here."""
        with self._queue.lock:
            if self._promise is None or self._is_future_done:
                return
            self._is_future_done = True
        self._promise.set_result(None)

    def _outcome(self, _: object) -> Any:
        """Return the result, or raise why there is none."""
        if self._error is not None:
            raise self._error
        self.synchronize()
        return self._result

    # What torch.distributed asks for.

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Wait until the operation is done.

        Raises:
            torch.distributed.DistBackendError: it failed, or did not end in time.
        """
        timeout_s = timeout.total_seconds() if timeout > NO_TIMEOUT else self._timeout_s
        if not self._waiter.until(self.advance, timeout_s):
            raise dist.DistBackendError(self._timeout_text(timeout_s))
        if self._error is not None:
            raise self._error
        self.synchronize()
        return True

    def get_future(self) -> Future[Any]:
        """Return a future of `result`, which another thread completes.

        To code in C++, such as DDP's, an exception that is set by `set_exception` is a result, and not the tensors
        that it takes it for; one that a callback raises is an error everywhere.
        """
        if self._future is None:
            devices = {t.device for t in tensors_in(self._result) if not accelerator.is_host(t.device)}
            self._promise = Future(devices=sorted(devices, key=str))
            self._future = self._promise.then(self._outcome)
            if self.is_done:
                self.complete_future()
            else:
                self._leave_to_completer()
        return self._future

    def is_completed(self) -> bool:
        """Return whether the operation is done, on its device, too."""
        return self.advance() and (self._finished is None or self._finished.is_reached())

    def is_success(self) -> bool:
        """Return whether the operation is done, and did not fail."""
        return self.is_done and self._error is None

    def exception(self) -> Exception | None:
        """Return why the operation failed; None if it did not."""
        return self._error

    def result(self) -> Any:
        """Return the tensors with the result."""
        return self._result

    def synchronize(self) -> None:
        """Let the current stream wait for the results of an operation that is done; nothing on the CPU."""
        if self._finished is not None:
            self._finished.block()


class Completer:
    """Threads that complete operations that have a future, or that wait for others of their name.

    One of them asks Horovod. Before it completes a future, whose callbacks may wait for other operations
    (PowerSGD's do), it lets another one ask.

    Args:
        waiter: waits until Horovod has completed an operation.
    """

    def __init__(self, waiter: Waiter) -> None:
        self._waiter = waiter
        self._queues: dict[NameQueue, None] = {}
        self._changed = threading.Condition()
        self._asking = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._num_free = 0
        self._is_closed = False

    def add(self, queue: NameQueue) -> None:
        """Complete the operations of a name as soon as possible."""
        with self._changed:
            self._queues[queue] = None
            self._provide_thread()
            self._changed.notify()

    def close(self) -> None:
        """End the threads."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        for thread in self._threads:
            thread.join()

    def _provide_thread(self) -> None:
        if self._queues and not self._num_free and not self._is_closed:
            self._num_free += 1
            self._threads.append(start_thread(self._run, "horovod-futures"))

    def _run(self) -> None:
        while True:
            with self._asking:
                done = self._next_done()
            if not done:
                return
            with self._changed:
                self._num_free -= 1
                self._provide_thread()
            for work in done:
                work.complete_future()
            with self._changed:
                self._num_free += 1

    def _next_done(self) -> list[HorovodWork]:
        """Wait until operations are done, and return them; empty at the end."""
        done: list[HorovodWork] = []

        def are_some_done() -> bool:
            with self._changed:
                self._changed.wait_for(lambda: self._queues or self._is_closed)
                if self._is_closed:
                    return True
                queues = list(self._queues)
            done.extend(work for queue in queues for work in queue.take_ended())
            with self._changed:
                self._queues = dict.fromkeys(queue for queue in self._queues if queue.is_busy)
            return bool(done)

        self._waiter.until(are_some_done, math.inf)
        # Callbacks begin operations, which all ranks have to begin in one order.
        return sorted(done, key=lambda work: work.number)
