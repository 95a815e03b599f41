"""Which rank is to blame, from the events and heartbeats of all ranks: pure functions.

When a rank fails, its collectives break on the others within milliseconds. So the first event to arrive is not
always the cause, and a rank that waits for others is not the one that stalls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from hvd_trainer.faults.collectives import CollectiveCall
from hvd_trainer.utils.text import ranks_text


@dataclass(frozen=True)
class RootCause:
    """The rank whose failure ends the job."""

    rank: int
    text: str
    """the report on it; empty where all ranks left alike"""
    reported: bool
    """whether the report has been printed"""


@dataclass(frozen=True)
class Heartbeat:
    """A rank's last message about itself, and its age."""

    step: int = 0
    phase: str = "start"
    seconds: float = 0.0
    """since its last progress, as of the message"""
    is_waiting: bool = False
    """whether it waits for other ranks"""
    limit_s: float | None = None
    """how long it may go without progress; None: no limit"""
    silent_s: float = 0.0
    """age of the message"""
    oldest_s: float = 0.0
    """age of the oldest collective of `hvd` that it waits for, with or without its main thread"""


Facts = Mapping[int, Sequence[CollectiveCall]]
"""The last collectives of each rank that has told them."""

Kind = Literal["orphaned", "raised", "waits", "lost", "left", "interrupted"]


@dataclass(frozen=True)
class Event:
    """The end of a rank, and how it ended; or that it waits for one that has come to its end."""

    kind: Kind
    rank: int
    text: str = ""
    """the error in one line"""
    detail: str = ""
    """the traceback, where it is not printed elsewhere"""
    in_collective: bool = False
    """whether it was raised in a collective, so that another rank may have caused it"""
    peer: int | None = None
    """the rank that it waits for"""


def find_root_cause(events: Sequence[Event]) -> Event:
    """Return the event that caused the others; of equally likely ones the first."""
    return min(events, key=_priority)


def _priority(event: Event) -> int:
    if event.kind == "raised":
        return 4 if event.in_collective else 1
    return {"orphaned": 0, "lost": 2, "interrupted": 3, "waits": 4, "left": 5}[event.kind]


def is_certain(event: Event) -> bool:
    """Return True if no event that may still arrive could be the cause of this one."""
    return _priority(event) <= 1


@dataclass(frozen=True)
class Stall:
    """The ranks that keep the job from making progress."""

    ranks: tuple[int, ...]
    kind: Literal["silent", "late", "crossed", "overdue"]
    """no heartbeats; no progress; all ranks wait for each other; a rank has waited for long, whatever others do"""


def find_stall(heartbeats: Mapping[int, Heartbeat], silence_limit_s: float) -> Stall | None:
    """Return the ranks that hold up the others; None if there are none."""
    silent = tuple(rank for rank, beat in heartbeats.items() if beat.silent_s > silence_limit_s)
    if silent:
        return Stall(silent, "silent")
    late = {
        rank: beat
        for rank, beat in heartbeats.items()
        if beat.limit_s is not None and beat.seconds + beat.silent_s > beat.limit_s
    }
    busy = {rank: beat for rank, beat in late.items() if not beat.is_waiting}
    if busy:
        return Stall(_furthest_behind(busy), "late")
    if len(late) == len(heartbeats):
        return Stall(_furthest_behind(late), "crossed")
    return None


def _furthest_behind(heartbeats: Mapping[int, Heartbeat]) -> tuple[int, ...]:
    first = min(beat.step for beat in heartbeats.values())
    return tuple(rank for rank, beat in heartbeats.items() if beat.step == first)


def missing_in(call: CollectiveCall, facts: Facts) -> tuple[int, ...]:
    """Return the ranks of a group that have not begun one of its collectives."""
    members = [rank for rank in sorted(facts) if not call.ranks or rank in call.ranks]
    return tuple(rank for rank in members if call.is_missing_in(list(facts[rank])))


def waits_of(rank: int, facts: Facts) -> dict[CollectiveCall, tuple[int, ...]]:
    """Return what a rank has begun and others have not, and those ranks."""
    under_way = [call for call in facts.get(rank, ()) if not call.is_done]
    return {call: missing for call in under_way if (missing := missing_in(call, facts))}


def culprit(stall: Stall, heartbeats: Mapping[int, Heartbeat], facts: Facts) -> int | None:
    """Return the rank to blame for a stall; None if no rank waits for another one.

    Of ranks that are waited for, one that waits for nobody itself is the cause of the others' waits.
    """
    waits = {rank: {peer for missing in waits_of(rank, facts).values() for peer in missing} for rank in facts}
    awaited = [rank for rank in sorted(heartbeats) if any(rank in waits[other] for other in waits)]
    if stall.kind == "overdue":
        stall = Stall(tuple(awaited), "crossed")
    if stall.kind == "silent" or not awaited:
        return next(iter(stall.ranks), None)
    candidates = [rank for rank in awaited if stall.kind == "crossed" or rank in stall.ranks] or [*stall.ranks]
    busy = [rank for rank in candidates if not heartbeats[rank].is_waiting]
    free = [rank for rank in candidates if not waits.get(rank)]
    return (busy or free or candidates)[0]


def call_text(rank: int, facts: Facts) -> str:
    """Return what a rank waits in and for whom, such as ` in allreduce.a for rank 1`; empty if that is unknown."""
    for call, missing in waits_of(rank, facts).items():
        return f" in {call.text} for {ranks_text(missing)}"
    calls = sorted(facts.get(rank, ()), key=lambda call: call.is_done)
    return next((f"{', last' if call.is_done else ''} in {call.text}" for call in calls if call.text), "")
