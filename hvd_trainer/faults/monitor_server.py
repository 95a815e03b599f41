"""Rank 0's monitor: collects heartbeats and events of all ranks, and decides which rank's failure ends the job."""

from __future__ import annotations

import itertools
import secrets
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch.distributed as dist

from hvd_trainer.errors import LaunchError
from hvd_trainer.faults import failure_report, stack_dump
from hvd_trainer.faults.collectives import CollectiveCall
from hvd_trainer.faults.failure_report import STALL, Failure, describe_rank, reporter
from hvd_trainer.faults.messages import (
    Alive,
    Bye,
    Channel,
    Done,
    JobEnded,
    Left,
    Message,
    RankEnded,
    Stacks,
    StacksRequest,
)
from hvd_trainer.faults.monitor import (
    EXIT_GRACE_S,
    HEARTBEAT_S,
    SETTLE_S,
    STACKS_TIMEOUT_S,
    Monitor,
    MonitorSettings,
)
from hvd_trainer.faults.root_cause import (
    Event,
    Heartbeat,
    RootCause,
    Stall,
    culprit,
    find_root_cause,
    find_stall,
    is_certain,
    missing_in,
    waits_of,
)
from hvd_trainer.rendezvous.endpoint import Endpoint
from hvd_trainer.utils import network
from hvd_trainer.utils.members import TOKEN_BYTES, accept_members

LEAVING_S = {"left": 3.0, "interrupted": 2.0}
"""How long all ranks may take to leave, if all of them were meant to."""
SEND_TIMEOUT_S = 1.0
MAX_OTHERS = 16
"""Lines about other ranks in a report."""
RANK_0_DELAY_S = 0.3
"""How much later rank 0 ends than the others, to which the end of their channel would be rank 0's failure."""


@dataclass(kw_only=True)
class _Inquiry:
    """A question to all ranks for their stacks and collectives, before the report of a stall or a failure."""

    stall: Stall | None
    """None: a collective has failed"""
    heartbeats: Mapping[int, Heartbeat]
    """of all ranks, when it began"""
    statuses: Mapping[int, Heartbeat]
    """of the stalled ranks on this machine"""
    until: float
    """when to stop waiting for answers, by `time.monotonic`"""
    stacks: dict[int, str] = field(default_factory=dict)


class MonitorServer(Monitor):
    """The monitor of rank 0, which publishes its address in the store and waits there for those of all others.

    Raises:
        LaunchError: not all have connected in time.
    """

    def __init__(self, settings: MonitorSettings, store: dist.Store, address: str) -> None:
        super().__init__(settings)
        self._heartbeats: dict[int, Heartbeat] = {}
        self._events: list[Event] = []
        self._first_event = 0.0
        self._inquiry: _Inquiry | None = None
        self._calls: dict[int, list[CollectiveCall]] = {}
        """the last ones of each rank that was asked, has failed in one, or is done"""
        self._lines: dict[int, str] = {}
        """of the user's own code where these ranks are"""
        self._left: dict[int, dict[int, RankEnded | None]] = {}
        """the ranks that have left a call which all make, and others not yet, with their errors"""
        self._overdue_s = 0.0
        """age of the oldest collective when it was last looked into"""
        self._closing_since: float | None = None
        self._token = secrets.token_hex(TOKEN_BYTES)
        for rank, connection in self._accept_others(store, address).items():
            connection.settimeout(SEND_TIMEOUT_S)
            self._heartbeats[rank] = Heartbeat()
            self.add_channel(rank, Channel(connection))

    def _accept_others(self, store: dist.Store, address: str) -> dict[int, socket.socket]:
        limit_s = self.settings.startup_s
        deadline = time.monotonic() + limit_s

        def give_up_if_due() -> None:
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"{self.world} waited {limit_s:.0f} s for all ranks to connect to {address}; not all came. "
                    f"See what they printed: they may have ended; else a firewall may stand between the nodes."
                )

        with network.listen(address, 0) as listener:
            store.set("monitor", str(Endpoint(address, listener.getsockname()[1], self._token)))
            return accept_members(listener, self._token, range(1, self.world.size), give_up_if_due)

    def handle_loss(self, rank: int) -> None:
        if rank not in self.done and all(event.rank != rank for event in self._events):
            self._add_event(Event("lost", rank, *self.local_ranks.ending(rank)))

    def handle(self, rank: int, message: Message) -> None:
        if isinstance(message, Alive | RankEnded) and message.heartbeat is not None:
            self._heartbeats[rank] = message.heartbeat
        match message:
            case Done(where=where, calls=calls):
                self.done[rank] = Done(rank=rank, where=where, calls=calls)
                self._calls[rank] = calls
                self.broadcast(self.done[rank])
                if len(self.done) == self.world.size:
                    self.broadcast(Bye())
                    self.everyone_is_done.set()
            case Left(number=number, ended=ended):
                left = self._left.setdefault(number, {})
                left[rank] = ended
                if len(left) == self.world.size:
                    del self._left[number]
                    if any(left.values()):
                        self.broadcast(Left(number=number))
                        self.everyone_left.set()
            case Stacks():
                self._note(message)
            case RankEnded(event=event, calls=calls, line=line):
                self._calls[rank], self._lines[rank] = calls, line
                is_interrupted = event.kind == "interrupted"
                if self.cause is None and rank == 0 and (message.is_users or is_interrupted):
                    # All ranks have the same error, and rank 0's main thread prints it.
                    self._end_all(RootCause(0, event.text, reported=is_interrupted), EXIT_GRACE_S)
                else:
                    self._add_event(replace(event, rank=rank), certain=not message.is_users)

    def _add_event(self, event: Event, certain: bool = True) -> None:
        if not self._events:
            self._first_event = time.monotonic()
        self._events.append(event)
        if certain and is_certain(event) and self.cause is None:
            self._report_event(event)

    def send_heartbeat(self) -> None:
        self.broadcast(Alive())

    def check(self, now: float) -> None:
        if self.cause is not None:
            return
        if self._inquiry is not None and self._inquiry.stall is not None:
            if self._is_answered(self._inquiry, now):
                self._report_stall(self._inquiry, self._inquiry.stall)
        elif self._events:
            self._judge_events(now)
        elif not self._closing:
            heartbeats = self._current_heartbeats(now)
            if self._judge_left(heartbeats):
                return
            stall = None if self.has_reported_stall else find_stall(heartbeats, self.activity.silence_limit_s)
            if stall is None and self._is_overdue(heartbeats):
                stall = Stall((), "overdue")
            if stall is not None:
                self._inquiry = self._inquire(stall, now)

    def _judge_left(self, heartbeats: Mapping[int, Heartbeat]) -> bool:
        """End the job if ranks have left a call by an error, and all others wait; return whether it ends.

        What leaves `fit` on one rank alone may be caught there: that rank does not fail, and has no time limit.
        """
        for left in self._left.values():
            errors = {ended.event: ended for ended in left.values() if ended is not None}
            inside = [beat for rank, beat in heartbeats.items() if rank not in left]
            if errors and all(beat.is_waiting and beat.seconds > LEAVING_S["left"] for beat in inside):
                ended = errors[event := find_root_cause([*errors])]
                self._calls[event.rank], self._lines[event.rank] = ended.calls, ended.line
                self._heartbeats[event.rank] = ended.heartbeat or Heartbeat()
                text = f"{event.text} (caught by its script, while all other ranks wait for this one)"
                self._first_event = time.monotonic()
                self._report_event(replace(event, text=text), is_caught=True)
                return True
        return False

    def _is_overdue(self, heartbeats: Mapping[int, Heartbeat]) -> bool:
        """Return whether a rank has just waited for as long as it may."""
        oldest = max(beat.oldest_s for beat in heartbeats.values())
        before = self._overdue_s if oldest >= self._overdue_s else 0.0
        due = any(before < limit <= oldest for limit in (self.activity.warn_wait_s, self.activity.end_wait_s))
        self._overdue_s = oldest if due else before
        return due

    def _current_heartbeats(self, now: float) -> dict[int, Heartbeat]:
        heartbeats = {0: self.own_heartbeat()}
        for rank in self.channels:
            silent_s = max(0.0, now - self.last_message[rank] - HEARTBEAT_S)
            heartbeats[rank] = replace(self._heartbeats[rank], silent_s=silent_s)
        return heartbeats

    # Ranks that end.

    def _judge_events(self, now: float) -> None:
        """Report the root cause, once it cannot be preceded by another event."""
        event = find_root_cause(self._events)
        leaving = {event.rank for event in self._events if event.kind == "left"}
        if event.kind == "left" and len(leaving) == self.world.size:
            # That all ranks leave training early is no failure.
            self._end_all(RootCause(event.rank, "", reported=False), 2 * EXIT_GRACE_S)
        elif now - self._first_event < LEAVING_S.get(event.kind, SETTLE_S):
            return
        elif self._calls.get(event.rank) or (event.kind == "lost" and event.detail):
            # A rank has not come to a collective, or ranks have called different ones.
            self._inquiry = self._inquiry or self._inquire(None, now)
            if self._is_answered(self._inquiry, now):
                self._report_event(event)
        else:
            self._report_event(event)

    def _report_event(self, event: Event, *, is_caught: bool = False) -> None:
        """End the job because of an event, and report it, unless another process does."""
        if self.was_terminated_before(self._first_event):
            self._end_all(RootCause(event.rank, event.text, reported=True), 0.0)
            return
        failure = self._failure(event)
        reports = is_caught or not reporter.parent_reports
        if reports:
            reporter.report(failure.text())
        exit_in_s = EXIT_GRACE_S if event.kind in ("raised", "left") and not is_caught else 0.2
        self._end_all(RootCause(failure.rank, failure.text(), reported=reports), exit_in_s)

    def _failure(self, event: Event) -> Failure:
        """Return what an event shows: if it waits for a rank that has come to its end, that rank's failure."""
        heartbeat = self._heartbeats.get(event.rank, Heartbeat()) if event.rank else self.own_heartbeat()
        if event.kind in ("lost", "orphaned"):
            heartbeat = self.local_ranks.last_status(event.rank) or heartbeat
        before = [*itertools.takewhile(lambda rank: rank != event.rank, self.done)]
        calls = [call for call in self._calls.get(event.rank, []) if call.text]
        if calls:  # else it is unknown what the rank was in
            before = [rank for rank in before if any(rank in missing_in(call, self._calls) for call in calls)]
        where = failure_report.describe_position(heartbeat)
        if not (before and event.in_collective and event.kind in ("raised", "waits")):
            return self._failure_to_come(event, where) or Failure(
                rank=event.rank,
                peers=self.peers,
                heartbeat=heartbeat,
                what=event.text,
                detail=event.detail,
                others=self._others(*([] if calls else [event.rank])),
            )
        ended = event.peer if event.peer in before else before[0]
        return Failure(
            rank=ended,
            peers=self.peers,
            heartbeat=self._heartbeats.get(ended, Heartbeat()) if ended else self.own_heartbeat(),
            what=f"came to its end{self.done[ended].where}, and rank {event.rank} was in a collective with it: "
            "give all ranks equally many batches, or let all of them leave",
            detail=f"rank {event.rank}: {where}: {event.text}\n{event.detail}",
        )

    def _failure_to_come(self, event: Event, where: str) -> Failure | None:
        """Return the failure of a rank that has not come to the collective in which another one has failed."""
        inquiry, own = self._inquiry, self._calls.get(event.rank, [])
        if inquiry is None or event.kind != "raised":
            return None
        last = {call.group: call for call in reversed(own)}  # PyTorch counts a failed one as done
        for call in (*(call for call in own if not call.is_done), *last.values()):
            missing = [rank for rank in missing_in(call, self._calls) if rank in inquiry.stacks]
            if missing:
                rank = next((rank for rank in missing if not inquiry.heartbeats[rank].is_waiting), missing[0])
                stack = stack_dump.training_section(inquiry.stacks.get(rank, ""), self.peers[rank].thread).rstrip()
                return Failure(
                    rank=rank,
                    peers=self.peers,
                    heartbeat=inquiry.heartbeats[rank],
                    what=f"has not come to {call.text}, in which rank {event.rank} has given up waiting",
                    detail=f"{stack}\nrank {event.rank}: {where}: {event.text}\n{event.detail}",
                    others=self._others(rank, event.rank),
                )
        return None

    def _end_all(self, cause: RootCause, exit_in_s: float) -> None:
        """Tell all ranks why the job ends, and in how many seconds they have to."""
        self.broadcast(JobEnded(cause=cause, exit_in_s=exit_in_s))
        self.end_job(cause, exit_in_s + RANK_0_DELAY_S)

    # Ranks that stall.

    def _inquire(self, stall: Stall | None, now: float) -> _Inquiry:
        """Ask all ranks for their stacks and collectives, and one per machine for the stacks of silent ranks."""
        silent = stall.ranks if stall is not None and stall.kind == "silent" else ()
        # Read before a stopped rank is made to run on in order to give its stacks.
        statuses = {rank: beat for rank in silent if (beat := self.local_ranks.last_status(rank)) is not None}
        inquiry = _Inquiry(
            stall=stall,
            heartbeats=self._current_heartbeats(now),
            statuses=statuses,
            until=now + STACKS_TIMEOUT_S,
        )
        for rank, channel in self.channels.items():
            if rank not in silent:
                channel.send(StacksRequest(silent=silent))
        for answer in self.answers([0, *self.local_ranks.silent_neighbours(silent)]):
            self._note(answer, inquiry)
        return inquiry

    def _note(self, answer: Stacks, inquiry: _Inquiry | None = None) -> None:
        """Note what a rank has answered to an inquiry; None: the one that is under way."""
        inquiry, rank = inquiry or self._inquiry, answer.rank
        if inquiry is None:
            return
        inquiry.stacks[rank] = answer.text
        if all(event.rank != rank for event in self._events):  # what such a rank has told is from where it failed
            self._calls[rank], self._lines[rank] = answer.calls, answer.line

    def _is_answered(self, inquiry: _Inquiry, now: float) -> bool:
        return now > inquiry.until or inquiry.stacks.keys() >= {0, *self.channels}

    def _forget_answers(self) -> None:
        """Let a further inquiry begin with what is known for good: the collectives of ranks that are done."""
        self._inquiry = None
        self._calls = {rank: done.calls for rank, done in self.done.items()}
        self._lines.clear()

    def _others(self, *named: int) -> list[str]:
        """Return a line for each rank that has told where it is, but for those that the report names already."""
        inquiry = self._inquiry
        heartbeats = self._current_heartbeats(time.monotonic()) if inquiry is None else inquiry.heartbeats
        lines = [
            describe_rank(rank, heartbeats[rank], self._calls, self._lines.get(rank, ""))
            for rank in sorted(heartbeats)
            if rank not in named and (inquiry is not None or rank in self._calls)
        ]
        if len(lines) > MAX_OTHERS:
            lines[MAX_OTHERS:] = [f"and {len(lines) - MAX_OTHERS} more"]
        return lines

    def _report_stall(self, inquiry: _Inquiry, stall: Stall) -> None:
        """Report a stall with the stacks of all ranks, and end the job, if a time limit was given."""
        rank = culprit(stall, inquiry.heartbeats, self._calls)
        if rank is None:  # they have all come meanwhile
            self._forget_answers()
            return
        activity, heartbeat = self.activity, inquiry.heartbeats[rank]
        is_named = any(call.is_named for call in waits_of(rank, self._calls))
        waited_s = max(beat.oldest_s for beat in inquiry.heartbeats.values())
        goes_on = activity.reports_only
        if stall.kind == "overdue":
            goes_on = not 0 < activity.end_wait_s <= waited_s
        if not goes_on:
            self.exit_even_if_blocked()
        what = {
            "silent": f"has not answered for {heartbeat.silent_s:.0f} s: it is stopped, or its machine is",
            "late": f"has made no progress for {heartbeat.seconds + heartbeat.silent_s:.0f} s ("
            + ("--timeout-s would end it" if goes_on else "if it may, raise --timeout-s")
            + ")",
            "crossed": "waits for the others and they for it: "
            + ("under other names" if is_named else "they have not made the same collectives")
            + ", or one takes "
            + (f"longer than {heartbeat.seconds:.0f} s" if goes_on else "longer than --timeout-s"),
            "overdue": f"has kept others waiting for {waited_s:.0f} s "
            + (f"(HOROVOD_STALL_{'CHECK' if goes_on else 'SHUTDOWN'}_TIME_SECONDS)"),
        }[stall.kind]
        is_awaited = stall.kind in ("crossed", "overdue") and heartbeat.is_waiting
        folder = failure_report.report_folder(self.log_folder, self._token)
        text, thread = inquiry.stacks.get(rank, ""), self.peers[rank].thread
        failure = Failure(
            title=STALL if goes_on else "failure",
            rank=rank,
            peers=self.peers,
            heartbeat=inquiry.statuses.get(rank, heartbeat),
            what=what,
            is_last_known=stall.kind == "silent" and rank not in inquiry.statuses,
            detail="" if is_awaited else stack_dump.training_section(text, thread),
            others=self._others(*(() if is_awaited else (rank,))),
            folder=str(folder),
        )
        failure_report.save_stacks(folder, inquiry.stacks, failure.text())
        if goes_on:
            self.has_reported_stall |= stall.kind != "overdue"
            reporter.write(failure.text())
            self._forget_answers()
            return
        reporter.report(failure.text())
        self.local_ranks.kill(self.local_ranks.silent_neighbours(stall.ranks if stall.kind == "silent" else ()))
        self._end_all(RootCause(rank, failure.text(), reported=True), 0.2)

    # The end of the monitor.

    def is_deciding(self) -> bool:
        return bool(self._events) or self._inquiry is not None

    def disconnect(self) -> None:
        self.broadcast(Bye())
        self.close_channels()

    def disconnect_if_done(self) -> bool:
        now = time.monotonic()
        self._closing_since = self._closing_since or now
        # After a failure soon, else once all other ranks have said that they are done.
        limit_s = RANK_0_DELAY_S if self.cause else EXIT_GRACE_S
        if self.channels.keys() - self.done.keys() and now - self._closing_since < limit_s:
            return False
        self.disconnect()
        return True
