"""Who is to blame, from what the ranks have said of themselves: pure functions.

One rank's failure becomes everybody's within milliseconds, when the exchange with it breaks. So what is told first
is not always the cause, and a rank that waits for others is not stuck by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Heartbeat:
    """What is known of a rank: its last words about itself, and how long ago they were."""

    step: int = 0
    phase: str = "start"
    seconds: float = 0.0
    """since it last got on, when it said so"""
    waits: bool = False
    limit_s: float | None = None
    """how long it may be without getting on"""
    silent_s: float = 0.0


Kind = Literal["orphaned", "raised", "lost", "left", "interrupted"]


@dataclass(frozen=True)
class Event:
    """What ends a rank. In the order in which the events came."""

    kind: Kind
    rank: int
    text: str = ""
    """the error in one line"""
    detail: str = ""
    """the traceback, where it is not printed elsewhere"""
    in_exchange: bool = False


def root_cause(events: Sequence[Event]) -> Event:
    """The event that has caused the others."""
    return min(events, key=_order)  # the first of equals


def _order(event: Event) -> int:
    if event.kind == "raised":
        return 4 if event.in_exchange else 1
    return {"orphaned": 0, "lost": 2, "interrupted": 3, "left": 5}[event.kind]


def is_certain(event: Event) -> bool:
    """Whether nothing that may still be heard could be the cause of it."""
    return _order(event) <= 1


@dataclass(frozen=True)
class Stall:
    """Which ranks hold the job up, and how it shows."""

    ranks: tuple[int, ...]
    how: Literal["silent", "late", "crossed"]


def find_stalls(signs: Mapping[int, Heartbeat], patience_s: float) -> Stall | None:
    """The ranks that hold the others up; None while there is nothing to complain of.

    Args:
        signs: of all ranks.
        patience_s: how long a rank may be silent.
    """
    silent = tuple(rank for rank, sign in signs.items() if sign.silent_s > patience_s)
    if silent:
        return Stall(silent, "silent")
    late = {
        rank: sign
        for rank, sign in signs.items()
        if sign.limit_s is not None and sign.seconds + sign.silent_s > sign.limit_s
    }
    busy = {rank: sign for rank, sign in late.items() if not sign.waits}
    if busy:
        return Stall(_furthest_behind(busy), "late")
    if len(late) == len(signs):
        return Stall(_furthest_behind(late), "crossed")
    return None


def _furthest_behind(signs: Mapping[int, Heartbeat]) -> tuple[int, ...]:
    fewest = min(sign.step for sign in signs.values())
    return tuple(rank for rank, sign in signs.items() if sign.step == fewest)
