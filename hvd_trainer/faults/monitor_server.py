"""Rank 0's watch: the end of all lines, where events are collected and decided on."""

from __future__ import annotations

import json
import secrets
import selectors
import socket
import time
from dataclasses import asdict, replace
from typing import Any

import torch.distributed as dist

from hvd_trainer.faults import failure_report, stack_dump
from hvd_trainer.faults.channel import LONGEST_GREETING, LONGEST_MESSAGE, Channel
from hvd_trainer.faults.failure_report import reporter
from hvd_trainer.faults.monitor import BEAT_S, GONE, GRACE_S, SETTLE_S, STACKS_S, Monitor
from hvd_trainer.faults.root_cause import (
    Event,
    Heartbeat,
    RootCause,
    Stall,
    find_root_cause,
    find_stall,
    is_certain,
)

LEAVING_S = {"left": 3.0, "interrupted": 2.0}
"""Within which all ranks leave if all were meant to."""
MAX_OTHERS = 16
MAX_UNAUTHENTICATED = 256
"""Connections that have not said yet whose they are, beyond as many as there are ranks. The oldest goes first."""
FAREWELL_S = 0.3
"""Rank 0 ends so much later than the others, to whom the end of their line would be its failure."""


class MonitorServer(Monitor):
    """The watch of rank 0."""

    def connect(self, store: dist.Store, address: str) -> None:
        self._token = secrets.token_hex(16)
        self._listener = socket.create_server((address, 0))
        store.set("watch", json.dumps([address, self._listener.getsockname()[1], self._token]))
        self._lines: dict[int, Channel] = {}
        self._strangers: dict[Channel, None] = {}
        self._awaited = set(range(1, self.world.size))
        self._signs: dict[int, Heartbeat] = {}
        self._heard: dict[int, float] = {}
        self._done: set[int] = set()
        self._events: list[Event] = []
        self._first_event = self._closing_since = 0.0
        self._stuck: Stall | None = None
        self._stuck_signs: dict[int, Heartbeat] = {}
        self._stuck_place: Heartbeat | None = None
        self._stacks: dict[int, str] = {}
        self._stacks_until = 0.0
        self.selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return  # too many open files, or it is gone again
        connection.settimeout(BEAT_S)
        line = Channel(connection, most_bytes=LONGEST_GREETING)
        self._strangers[line] = None
        self.selector.register(line, selectors.EVENT_READ, lambda: self._greet(line))
        if len(self._strangers) > MAX_UNAUTHENTICATED + self.world.size:
            self._dismiss(next(iter(self._strangers)))

    def _dismiss(self, line: Channel) -> None:
        del self._strangers[line]
        self.selector.unregister(line)
        line.close()

    def _greet(self, line: Channel) -> None:
        """The first message says whose line it is; who does not know the token is no rank of ours."""
        if line not in self._strangers:
            return  # dismissed by what came just before
        messages = line.receive()
        if messages == []:
            return  # half of it
        match messages:
            case [{"token": str(token), "rank": int(rank)}, *rest] if (
                secrets.compare_digest(ascii(token), ascii(self._token)) and rank in self._awaited
            ):
                del self._strangers[line]
                self.selector.unregister(line)
                line.most_bytes = LONGEST_MESSAGE
                self._awaited.discard(rank)
                self._lines[rank], self._signs[rank], self._heard[rank] = line, Heartbeat(), time.monotonic()
                self.selector.register(line, selectors.EVENT_READ, lambda: self._hear(rank))
                for message in rest:
                    self._handle(rank, message)
            case _:
                self._dismiss(line)
        if not self._awaited:
            self._close_listener()

    def _close_listener(self) -> None:
        """All ranks have come, and none comes twice."""
        if self._listener.fileno() >= 0:
            self.selector.unregister(self._listener)
            self._listener.close()
        for line in list(self._strangers):
            self._dismiss(line)

    def _hear(self, rank: int) -> None:
        messages = self._lines[rank].receive()
        if messages is None:
            line = self._lines.pop(rank)
            self.selector.unregister(line)
            line.close()
            if rank not in self._done and all(event.rank != rank for event in self._events):
                self._happen(Event("lost", rank, GONE))
            return
        self._heard[rank] = time.monotonic()
        for message in messages:
            self._handle(rank, message)

    def take(self, word: dict[str, Any]) -> None:
        self._handle(0, word)

    def _handle(self, rank: int, message: dict[str, Any]) -> None:
        if "sign" in message:
            self._signs[rank] = Heartbeat(**message["sign"])
        match message["kind"]:
            case "done":
                self._done.add(rank)
            case "stacks":
                self._stacks[message["of"]] = message["text"]
            case "raised" | "left" | "interrupted" | "orphaned" as kind:
                users = message.get("user", False)
                event = Event(
                    kind, rank, message["text"], message.get("detail", ""), message.get("in_exchange", False)
                )
                if self.cause is None and rank == 0 and (users or kind == "interrupted"):
                    # It happens to all ranks alike, and rank 0 says it by itself.
                    self._finish(RootCause(0, event.text, reported=kind == "interrupted"), GRACE_S)
                else:
                    self._happen(event, certain=not users)

    def _happen(self, event: Event, certain: bool = True) -> None:
        if not self._events:
            self._first_event = time.monotonic()
        self._events.append(event)
        if certain and is_certain(event) and self.cause is None:
            self._blame(event)

    def beat(self) -> None:
        for line in self._lines.values():
            line.send({"kind": "beat"})

    def look(self, now: float) -> None:
        if self.cause is not None:
            return
        if self._stuck is not None:
            if now > self._stacks_until or self._stacks.keys() >= {0, *self._lines}:
                self._report(self._stuck)
        elif self._events:
            self._weigh(now)
        elif not self._closing:
            stuck = find_stall(self._all_signs(now), self.activity.silence_limit_s)
            if stuck is not None:
                self._ask_for_stacks(stuck, now)

    def _weigh(self, now: float) -> None:
        event = find_root_cause(self._events)
        leaving = {event.rank for event in self._events if event.kind == "left"}
        if event.kind == "left" and len(leaving) == self.world.size:
            # All ranks leave training early, which is their right.
            self._finish(RootCause(event.rank, "", reported=False), 2 * GRACE_S)
        elif now - self._first_event >= LEAVING_S.get(event.kind, SETTLE_S):
            self._blame(event)

    def _all_signs(self, now: float) -> dict[int, Heartbeat]:
        signs = {0: self.own_sign()}
        for rank in self._lines:
            signs[rank] = replace(self._signs[rank], silent_s=max(0.0, now - self._heard[rank] - BEAT_S))
        return signs

    def resumed(self, seconds: float) -> None:
        super().resumed(seconds)
        self._heard = dict.fromkeys(self._heard, time.monotonic())

    def _blame(self, event: Event) -> None:
        """Reports what happened to a rank, unless somebody else does, and ends the job."""
        if self.ended_from_outside(self._first_event):
            self._finish(RootCause(event.rank, event.text, reported=True), 0.0)
            return
        sign = self._signs.get(event.rank, Heartbeat()) if event.rank else self.own_sign()
        if event.kind in ("lost", "orphaned"):
            sign = self.last_seen(event.rank) or sign
        found = self.failure_of(event.rank, sign, event.text, detail=event.detail)
        # `hvd_trainer.run` reports what its children raise, and how they end.
        tells = self.world.launcher != "run"
        if tells:
            reporter.report(found.text())
        self._finish(
            RootCause(event.rank, found.text(), tells), GRACE_S if event.kind in ("raised", "left") else 0.2
        )

    def _finish(self, cause: RootCause, ends_in_s: float) -> None:
        for line in self._lines.values():
            line.send({"kind": "end", "cause": asdict(cause), "ends_in_s": ends_in_s})
        self.decide(cause, ends_in_s + FAREWELL_S)

    def _ask_for_stacks(self, stuck: Stall, now: float) -> None:
        self._stuck, self._stuck_signs, self._stacks_until = stuck, self._all_signs(now), now + STACKS_S
        # Before a stopped one is made to run on, to give its stacks.
        self._stuck_place = self.last_seen(stuck.ranks[0])
        silent = stuck.ranks if stuck.kind == "silent" else ()
        for rank, line in self._lines.items():
            if rank not in silent:
                line.send({"kind": "stacks", "silent": silent})
        for rank in [0, *self.neighbours_among(silent)]:
            self._stacks[rank] = self.stacks_of(rank)

    def _report(self, stuck: Stall) -> None:
        self.end_for_sure()
        signs = self._stuck_signs
        rank = stuck.ranks[0]
        sign = signs[rank]
        what = {
            "silent": f"has not answered for {sign.silent_s:.0f} s: it is stopped, or its machine is",
            "late": f"has not got on for {sign.seconds + sign.silent_s:.0f} s (if it may, raise --timeout-s)",
            "crossed": "waits for the others and they for it: they have not made the same exchanges, or one takes "
            "longer than --timeout-s",
        }[stuck.kind]
        folder = failure_report.report_folder(self.log_folder, self._token)
        text = self._stacks.get(rank, "")
        place = "" if stuck.kind == "crossed" else stack_dump.main_thread_section(text).rstrip()
        others = [f"rank {other}: {described(sign)}" for other, sign in signs.items() if other != rank]
        found = self.failure_of(
            rank,
            self._stuck_place or sign,
            what,
            is_last_known=stuck.kind == "silent" and self._stuck_place is None,
            detail="\n".join(filter(None, (place, stack_dump.unfinished_section(text)))),
            others=others[:MAX_OTHERS] + ([f"and {more} more"] if (more := len(others) - MAX_OTHERS) > 0 else []),
            folder=str(folder),
        )
        for other, text in self._stacks.items():
            failure_report.save_file(folder, f"rank-{other}.txt", text)
        failure_report.save_file(folder, "report.txt", found.text())
        reporter.report(found.text())
        self.kill(self.neighbours_among(stuck.ranks if stuck.kind == "silent" else ()))
        self._finish(RootCause(rank, found.text(), reported=True), 0.2)

    def is_deciding(self) -> bool:
        return bool(self._events) or self._stuck is not None

    def part(self) -> bool:
        now = time.monotonic()
        self._closing_since = self._closing_since or now
        # Who fails goes on at once; else those are heard to the end that still have to say that they are done.
        limit_s = FAREWELL_S if self.cause else GRACE_S
        if self._lines.keys() - self._done and now - self._closing_since < limit_s:
            return False
        self.retire()
        return True

    def retire(self) -> None:
        for line in self._lines.values():
            line.send({"kind": "bye"})
            line.close()
        self._close_listener()


def described(sign: Heartbeat) -> str:
    """Where a rank is, in a few words."""
    how = "waits" if sign.is_waiting else "busy"
    where = failure_report.describe_position(sign.step, sign.phase)
    return f"{where}, {how} for {sign.seconds + sign.silent_s:.0f} s"
