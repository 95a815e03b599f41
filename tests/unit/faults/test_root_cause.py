"""Which rank is blamed for what all of them report, and which one stalls the others."""

from __future__ import annotations

import pytest

from hvd_trainer.faults.root_cause import Event, Heartbeat, Stall, find_root_cause, find_stall


def test_find_root_cause() -> None:
    """A killed rank breaks exchanges; errors of other ranks may arrive before its own channel breaks."""
    broken = [Event("raised", rank, "connection closed", in_exchange=True) for rank in (0, 3)]
    lost, raised = Event("lost", 2), Event("raised", 1, "ValueError")
    assert find_root_cause([*broken, lost]) == lost
    assert find_root_cause([broken[0], lost, raised]) == raised
    assert find_root_cause(broken) == broken[0]
    assert find_root_cause([broken[0], Event("interrupted", 1)]).rank == 1
    assert find_root_cause([Event("left", 1), broken[0]]) == broken[0]
    assert find_root_cause([broken[0], Event("orphaned", 2)]).kind == "orphaned"
    assert find_root_cause([Event("waits", 0, peer=1), lost]) == lost


def waiting(seconds: float, step: int = 7) -> Heartbeat:
    return Heartbeat(step, "reduce", seconds, is_waiting=True, limit_s=60)


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
