"""Which rank is to blame, from the events and heartbeats of all ranks: pure functions.

When a rank fails, its exchanges break on the other ranks within milliseconds. So the first event to arrive is not
always the cause, and a rank that waits for others is not the one that stalls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal


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
    in_exchange: bool = False
    """whether it was raised in an exchange, so that another rank may have caused it"""
    peer: int | None = None
    """the rank that it waits for"""


def find_root_cause(events: Sequence[Event]) -> Event:
    """Return the event that caused the others; of equally likely ones the first."""
    return min(events, key=_priority)


def _priority(event: Event) -> int:
    if event.kind == "raised":
        return 4 if event.in_exchange else 1
    return {"orphaned": 0, "lost": 2, "interrupted": 3, "waits": 4, "left": 5}[event.kind]


def is_certain(event: Event) -> bool:
    """Return True if no event that may still arrive could be the cause of this one."""
    return _priority(event) <= 1


@dataclass(frozen=True)
class Stall:
    """The ranks that keep the job from making progress."""

    ranks: tuple[int, ...]
    kind: Literal["silent", "late", "crossed"]
    """no heartbeats; no progress; all ranks wait for each other"""


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
