"""Which rank is blamed for what all of them report, and which one stalls the others."""

from __future__ import annotations

import pytest

from hvd_trainer.faults.collectives import CollectiveCall
from hvd_trainer.faults.root_cause import Event, Heartbeat, Stall, call_text, culprit, find_root_cause, find_stall


def test_find_root_cause() -> None:
    """A killed rank breaks exchanges; errors of other ranks may arrive before its own channel breaks."""
    broken = [Event("raised", rank, "connection closed", in_collective=True) for rank in (0, 3)]
    lost, raised = Event("lost", 2), Event("raised", 1, "ValueError")
    assert find_root_cause([*broken, lost]) == lost
    assert find_root_cause([broken[0], lost, raised]) == raised
    assert find_root_cause(broken) == broken[0]
    assert find_root_cause([broken[0], Event("interrupted", 1)]).rank == 1
    assert find_root_cause([Event("left", 1), broken[0]]) == broken[0]
    assert find_root_cause([broken[0], Event("orphaned", 2)]).kind == "orphaned"
    assert find_root_cause([Event("waits", 0, peer=1), lost]) == lost


def waiting(seconds: float, step: int = 7) -> Heartbeat:
    return Heartbeat(step, "collective", seconds, is_waiting=True, limit_s=60)


@pytest.mark.parametrize(
    ("heartbeats", "found"),
    [
        ([waiting(59), Heartbeat(7, "data", 59, limit_s=60)], None),
        # A waiting rank does not stall; a busy one without progress does, unless its phase may be long.
        ([waiting(61), Heartbeat(7, "data", 62, limit_s=60), waiting(61)], Stall((1,), "late")),
        ([waiting(61), Heartbeat(7, "save", 62, limit_s=300), waiting(61)], None),
        ([waiting(61), Heartbeat(0, "start", 200), waiting(61)], None),
        # On GPUs a rank may be steps ahead of the one that stalls it.
        ([Heartbeat(9, "forward", 61, limit_s=60), Heartbeat(7, "data", 61, limit_s=60)], Stall((1,), "late")),
        ([waiting(61), Heartbeat(7, "backward", 3, silent_s=61, limit_s=60), waiting(61)], Stall((1,), "silent")),
        ([waiting(61, step=8), waiting(61, step=7)], Stall((1,), "crossed")),
    ],
)
def test_find_stall(heartbeats: list[Heartbeat], found: Stall | None) -> None:
    assert find_stall(dict(enumerate(heartbeats)), silence_limit_s=60) == found


def named(name: str) -> CollectiveCall:
    return CollectiveCall("hvd:0,1,2", 0, name, is_done=False, ranks=(0, 1, 2), is_named=True)


def numbered(number: int, *, is_done: bool = False) -> CollectiveCall:
    return CollectiveCall("gloo:0", number, f"all_reduce, number {number}", is_done, (0, 1, 2))


BUSY, WAITS = Heartbeat(7, "callback", 61, limit_s=60), waiting(61)


@pytest.mark.parametrize(
    ("stall", "heartbeats", "facts", "rank"),
    [
        # Both hosts are busy, one of them in a read that waits for its GPU's exchange.
        (
            Stall((0, 1), "late"),
            [BUSY, BUSY, WAITS],
            [[numbered(3)], [numbered(2, is_done=True)], [numbered(3)]],
            1,
        ),
        # Nobody waits for the first rank, which has begun what it waits for.
        (Stall((0, 1, 2), "crossed"), [WAITS] * 3, [[numbered(3)], [], [numbered(3)]], 1),
        (Stall((0, 1, 2), "crossed"), [WAITS] * 3, [[named("a")], [named("b")], [named("a")]], 0),
        (Stall((), "overdue"), [WAITS, WAITS, BUSY], [[named("a")], [named("a")], [named("b")]], 2),
        # All have come meanwhile.
        (Stall((), "overdue"), [WAITS] * 3, [[named("a")]] * 3, None),
        # Silent ranks tell nothing.
        (Stall((2,), "silent"), [WAITS] * 3, [[numbered(3)], [numbered(2)], []], 2),
    ],
)
def test_culprit(
    stall: Stall, heartbeats: list[Heartbeat], facts: list[list[CollectiveCall]], rank: int | None
) -> None:
    assert culprit(stall, dict(enumerate(heartbeats)), dict(enumerate(facts))) == rank


def test_call_text() -> None:
    facts = {0: [named("a")], 1: [named("b")], 2: [named("a")], 3: [numbered(3, is_done=True)], 4: []}
    assert [call_text(rank, facts) for rank in facts] == [
        *(" in a for rank 1", " in b for ranks 0, 2", " in a for rank 1", ", last in all_reduce, number 3", ""),
    ]
    # The other ranks have all begun it, or more.
    assert call_text(0, {0: [numbered(3)], 1: [numbered(4)]}) == " in all_reduce, number 3"
