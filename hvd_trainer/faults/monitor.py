"""The monitor of a rank: a thread that finds out which rank failed or stalls, and ends this process then.

Rank 0's monitor (`MonitorServer`) collects heartbeats and events of all ranks and decides; the other ranks'
monitors (`MonitorClient`) are connected to it. This module has what both have in common.
"""

from __future__ import annotations

import logging
import os
import queue
import selectors
import socket
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NoReturn

from hvd_trainer.errors import UserError, first_line
from hvd_trainer.faults import collectives, failure_report, stack_dump
from hvd_trainer.faults.activity import END, Activity
from hvd_trainer.faults.failure_report import CRASH_EXIT_CODE, reporter
from hvd_trainer.faults.local_ranks import LocalRanks
from hvd_trainer.faults.messages import Channel, Done, Left, Message, RankEnded, Stacks
from hvd_trainer.faults.root_cause import Event, Heartbeat, RootCause, missing_in
from hvd_trainer.launch.world import World
from hvd_trainer.rendezvous.ranks import RankInfo
from hvd_trainer.utils.frames import format_traceback
from hvd_trainer.utils.network import LOOPBACK, shut_down_connections
from hvd_trainer.utils.threads import start_thread

logger = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
SETTLE_S = 0.3
"""How much later than its consequences a cause may arrive: collectives with a rank that died break before its
monitor's channel does."""
MAX_TURN_GAP_S = 5.0
"""A longer gap between two turns of the monitor thread means that the process was suspended (Ctrl-Z)."""
STACKS_TIMEOUT_S = stack_dump.ANSWER_TIMEOUT_S + 2
MIN_WAIT_S = 0.5
"""How long a rank has made no progress before it is asked whether it waits for one that has come to its end."""
EXIT_GRACE_S = 3.0
"""How long a rank may take to end by itself, or by its launcher."""
PARENT_LAUNCHERS = ("horovodrun", "torchrun", "mpirun", "mpiexec", "run")
"""Launchers whose processes are the ranks' parents until the job ends."""


@dataclass(frozen=True, kw_only=True)
class MonitorSettings:
    """What a monitor needs to know of its rank and the others."""

    world: World
    peers: Sequence[RankInfo]
    activity: Activity
    """what this rank is doing"""
    environ: Mapping[str, str]
    startup_s: float
    """how long connecting may take"""
    elastic_timeout_s: float | None = None
    """in elastic mode, how long the other ranks may take to notice that one has failed; None: they end with it"""
    abort_collectives: Callable[[], None] = lambda: None
    """makes the device give up collectives with a rank that is gone, in elastic mode; may block"""


class Monitor(ABC):
    """The monitor of one rank.

    Attributes:
        log_folder: the run's log folder, once that is known: stacks are saved there.
        cause: the failure that ends the job; None as long as there is none.
        terminated_at: when this process was asked to end by a signal, by `time.monotonic`.
        done: the ranks that have come to their end, in that order.
        everyone_is_done: set when all ranks have.
        everyone_left: set when all ranks have left the call that this one has left by an error.
        has_reported_stall: whether one was reported after which the job continues.
        channels: to the monitors of other ranks, by rank.
        last_message: when each of these ranks has sent its last message, by `time.monotonic`.
    """

    def __init__(self, settings: MonitorSettings) -> None:
        self.settings = settings
        self.world, self.peers, self.activity = settings.world, settings.peers, settings.activity
        self.log_folder: str | None = None
        self.cause: RootCause | None = None
        self.terminated_at: float | None = None
        self.done: dict[int, Done] = {}
        self.everyone_is_done, self.everyone_left = threading.Event(), threading.Event()
        self.channels: dict[int, Channel] = {}
        self.last_message: dict[int, float] = {}
        self.local_ranks = LocalRanks(self.world.rank, self.peers)
        self.selector = selectors.DefaultSelector()
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self.selector.register(self._wake_receiver, selectors.EVENT_READ, self._handle_posted)
        self._posted: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._decided = threading.Event()
        self._closing = False
        self._parent = os.getppid() if self.world.launcher in PARENT_LAUNCHERS else None
        self._last_turn = self._last_heartbeat = time.monotonic()
        self.has_reported_stall = False
        self._exit_at: float | None = None
        self._hang_up_at: float | None = None
        self._exit_timer: threading.Timer | None = None
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)

    # Called by the main thread.

    def start(self) -> None:
        """Start the monitor's thread."""
        self._thread.start()

    def report_done(self, where: str = "") -> None:
        """Tell the other ranks that this one has come to its end, and how, if not after its last line."""
        self.activity.enter(END)
        self._post(Done(rank=self.world.rank, where=where))

    def report_left(self, number: int, error: BaseException | None) -> None:
        """Tell the other ranks that this one has left a call that all make, and by which error."""
        self.everyone_left.clear()
        ended = None if error is None else self._describe_error(error, may_be_caught=True)
        self._post(Left(number=number, ended=ended))

    def report_error(self, error: BaseException) -> RootCause | None:
        """Tell the other ranks why this one fails; return the failure that ends the job, or None if unknown."""
        self._post(self._describe_error(error))
        if not isinstance(error, KeyboardInterrupt):
            self._decided.wait(2 * EXIT_GRACE_S)
        return self.cause

    def finish_report(self) -> None:
        """Return when a report that is under way is printed; called when a signal is about to end this process."""
        self.terminated_at = time.monotonic()
        if not self._decided.wait(0.05) and self.is_deciding():
            self._decided.wait(STACKS_TIMEOUT_S)

    def close(self) -> None:
        """End the monitor."""
        self._post(None)
        self._thread.join(2 * EXIT_GRACE_S)
        if self._exit_timer is not None:
            self._exit_timer.cancel()
        self.selector.close()
        self._wake_sender.close()
        self._wake_receiver.close()
        self.local_ranks.close()

    def _post(self, message: Message | None) -> None:
        """Have the monitor's thread handle a message; None ends the thread."""
        self._posted.put(message)
        self._wake_sender.send(b"!")

    def _describe_error(self, error: BaseException, *, may_be_caught: bool = False) -> RankEnded:
        how: Literal["raised", "left", "interrupted"] = "raised"
        detail = ""
        text = "".join(traceback.format_exception_only(error)).strip()
        if isinstance(error, KeyboardInterrupt):
            how, text = "interrupted", "was interrupted"
        elif isinstance(error, SystemExit):
            how, text = "left", f"called sys.exit({error.code}), and other ranks have not come to their end"
        elif isinstance(error, UserError):
            text = first_line(error)
        elif reporter.prints_tracebacks or may_be_caught:
            text, detail = "raised an exception", format_traceback(error, os.environ)
        event = Event(how, self.world.rank, _encodable(text), _encodable(detail), self.activity.in_collective)
        frames = [*traceback.walk_tb(error.__traceback__)]
        own = stack_dump.users_part([frame for frame, _ in frames])
        return RankEnded(
            event=event,
            is_users=isinstance(error, UserError),
            heartbeat=self.own_heartbeat(),
            calls=collectives.recent()
            if event.in_collective and isinstance(error, RuntimeError | TimeoutError)
            else [],
            line=stack_dump.users_line(own, frames[len(own) - 1][1]) if own else "",
        )

    # Called by the monitor's thread.

    @abstractmethod
    def handle(self, rank: int, message: Message) -> None:
        """Handle a message of another rank, or of this one itself."""

    @abstractmethod
    def handle_loss(self, rank: int) -> None:
        """Handle the end of a rank's channel, which is closed."""

    @abstractmethod
    def send_heartbeat(self) -> None:
        """Show the other ranks that this one is alive."""

    @abstractmethod
    def check(self, now: float) -> None:
        """Decide whether a rank has failed or stalls; called several times per second."""

    @abstractmethod
    def is_deciding(self) -> bool:
        """Return True if something has happened that is not reported yet."""

    @abstractmethod
    def disconnect(self) -> None:
        """Close the channels in such a way that no rank takes it for the death of this one."""

    @abstractmethod
    def disconnect_if_done(self) -> bool:
        """Disconnect and return True, unless other ranks still need the channels."""

    def answers(self, ranks: Sequence[int]) -> list[Stacks]:
        """Return the stacks of this rank, with its collectives, and of local ones that are silent."""
        resumes = not self.activity.reports_only
        answers = [Stacks(rank=rank, text=self.local_ranks.stacks_of(rank, resumes=resumes)) for rank in ranks]
        for answer in answers:
            if answer.rank == self.world.rank:
                answer.calls = collectives.recent()
                answer.line = stack_dump.users_line(stack_dump.training_stack())
        return answers

    def add_channel(self, rank: int, channel: Channel) -> None:
        """Handle what a rank sends by a channel from now on."""
        self.channels[rank], self.last_message[rank] = channel, time.monotonic()
        self.selector.register(channel, selectors.EVENT_READ, lambda: self._receive(rank))

    def _receive(self, rank: int) -> None:
        messages = self.channels[rank].receive()
        if messages is None:
            channel = self.channels.pop(rank)
            self.selector.unregister(channel)
            channel.close()
            self.handle_loss(rank)
            return
        self.last_message[rank] = time.monotonic()
        for message in messages:
            self.handle(rank, message)

    def broadcast(self, message: Message) -> None:
        """Send a message by all channels."""
        for channel in self.channels.values():
            channel.send(message)

    def close_channels(self) -> None:
        """Close all channels."""
        for channel in self.channels.values():
            channel.close()

    def _run(self) -> None:
        try:
            self._loop()
        except Exception:
            traceback.print_exc()
            if self.cause is not None:
                os._exit(CRASH_EXIT_CODE)  # the job ends, and nobody else would end this rank
            logger.error("The monitor of the ranks has failed, and training continues without it.")
            self.disconnect()
            self.everyone_is_done.set()  # nobody would say so any more
            self.everyone_left.set()

    def _loop(self) -> None:
        while True:
            for key, _ in self.selector.select(HEARTBEAT_S / 4):
                key.data()
            now = time.monotonic()
            if now - self._last_turn > MAX_TURN_GAP_S:
                self._resume(now - self._last_turn)
            self._last_turn = now
            self._check_launcher()
            if now - self._last_heartbeat >= HEARTBEAT_S:
                self._last_heartbeat = now
                self.send_heartbeat()
                self._check_wait(now)
            self.check(now)
            if self._closing and self.disconnect_if_done():
                return
            self._hang_up_if_due(now)
            if self._exit_at is not None and now >= self._exit_at:
                self._exit()

    def _handle_posted(self) -> None:
        self._wake_receiver.recv(1 << 12)
        while not self._posted.empty():
            message = self._posted.get()
            if message is None:
                self._closing = True
                continue
            if isinstance(message, Done):
                message.calls = collectives.recent()
                self.send_heartbeat()  # the last one, with the step in which it has ended
            self.handle(self.world.rank, message)

    def _check_wait(self, now: float) -> None:
        """Report it if this rank waits in a collective for a rank that has come to its end without beginning it.

        As long as it computes, evaluates or saves alone, or takes part in collectives, it is let.
        """
        activity = self.activity
        if not self.done or self.cause is not None or activity.phase == END or now - activity.since < MIN_WAIT_S:
            return
        for call in collectives.unfinished():
            for rank, done in self.done.items():
                if not call.is_named and missing_in(call, {rank: done.calls}):
                    stack = stack_dump.training_section(stack_dump.own_stacks())
                    event = Event("waits", self.world.rank, f"waits in {call.text}", stack, True, rank)
                    self.handle(self.world.rank, RankEnded(event=event, heartbeat=self.own_heartbeat()))
                    return

    def _check_launcher(self) -> None:
        """Treat the death of this rank's launcher, which would have ended it, as a failure."""
        if self._parent is not None and os.getppid() != self._parent:
            self._parent = None
            text = f"its launcher, {self.world.launcher}, has ended"
            self.handle(self.world.rank, RankEnded(event=Event("orphaned", self.world.rank, text)))

    def _resume(self, seconds: float) -> None:
        """Go on after a suspension of so many seconds, which do not count as lack of progress."""
        self.activity.since += seconds
        self.last_message = dict.fromkeys(self.last_message, time.monotonic())

    def own_heartbeat(self) -> Heartbeat:
        """Return this rank's heartbeat."""
        activity, oldest = self.activity, collectives.oldest()
        return Heartbeat(
            step=activity.step,
            phase=activity.phase,
            seconds=time.monotonic() - activity.since,
            is_waiting=activity.is_waiting,
            limit_s=None if _is_debugged() else activity.limit_s,
            oldest_s=0.0 if oldest is None else time.monotonic() - oldest,
        )

    # The end of the job.

    def was_terminated_before(self, event_s: float | None) -> bool:
        """Return True if this process was asked to end before an event: all ranks were, and it is no failure."""
        return self.terminated_at is not None and self.terminated_at < (event_s or 0.0) - SETTLE_S / 2

    def end_job(self, cause: RootCause, exit_in_s: float) -> None:
        """Make the job's end known to the main thread, and exit after a time if that has not left by then."""
        self.cause = cause
        elastic_timeout_s = self.settings.elastic_timeout_s
        if elastic_timeout_s is not None and cause.rank != self.world.rank:
            exit_in_s = elastic_timeout_s
            self._hang_up_at = time.monotonic() + EXIT_GRACE_S
            start_thread(self.settings.abort_collectives, "abort")
        if cause.reported:
            reporter.has_reported = True
        if cause.rank == self.world.rank:
            failure_report.write_torchrun_error(cause.text, self.settings.environ)
        self._decided.set()
        self._exit_at = time.monotonic() + exit_in_s

    def exit_even_if_blocked(self) -> None:
        """Exit in some seconds in any case: writing the report may block on the disk that all ranks wait for."""
        limit_s = max(2 * EXIT_GRACE_S, self.settings.elastic_timeout_s or 0)
        self._exit_timer = threading.Timer(limit_s, os._exit, (CRASH_EXIT_CODE,))
        self._exit_timer.daemon = True
        self._exit_timer.start()

    def _hang_up_if_due(self, now: float) -> None:
        """Break the collective with a failed rank that this rank waits in: if that host is gone, TCP does not.

        In other phases a connection to that host may be the user's own, and stays.
        """
        if self._hang_up_at is None or now < self._hang_up_at or self.cause is None:
            return
        if not (self.activity.is_waiting or self.activity.in_collective):
            return
        self._hang_up_at = None
        address = self.peers[self.cause.rank].address
        if address not in (LOOPBACK, self.peers[self.world.rank].address):
            shut_down_connections(address)

    def _exit(self) -> NoReturn:
        """Exit, since the main thread has not; in elastic mode print the reason, since others continue."""
        cause, limit_s = self.cause, self.settings.elastic_timeout_s
        if limit_s is not None and cause is not None and cause.rank != self.world.rank:
            where = failure_report.describe_position(self.own_heartbeat())
            reporter.write(
                f"{self.world} is ended: {limit_s:g} s after rank {cause.rank} failed it has not left ({where}). "
                f"If it may take so long, raise --startup-timeout-s\n"
            )
        os._exit(CRASH_EXIT_CODE)


def _encodable(text: str) -> str:
    """Return a text as UTF-8 can encode it: a file's name in an error may have other bytes."""
    return text.encode(errors="backslashreplace").decode()


def _is_debugged() -> bool:
    """Return True if pdb steps through the thread that trains: then there is no time limit."""
    return any(frame.f_trace is not None for frame in stack_dump.training_stack()[-1:])
