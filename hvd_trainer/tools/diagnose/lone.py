"""Find what only one rank does: lines of the user's code at which no other rank was ever seen."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from hvd_trainer.measure.stack_record import Frame
from hvd_trainer.tools.diagnose.profile import LONE, WAITING, RankProfile, Stack

MIN_SHARE = 0.05
"""Fraction of a rank's time from which a line is its own: of a shorter one, looks may miss the other ranks."""
MIN_LOOKS = 10
"""Looks on one rank that would hardly have missed the others, if these were as often there."""

Key = tuple[str, int]


def mark_lone(profiles: Sequence[RankProfile]) -> None:
    """Give the role `LONE` to stacks through lines that have much of one rank's time and were seen on no other."""
    if len(profiles) < 2:
        return
    lines = [{_key(f) for stack in p.stacks for f in stack.frames if f.owner == "user"} for p in profiles]
    for rank, profile in enumerate(profiles):
        others = set().union(*(keys for number, keys in enumerate(lines) if number != rank))
        through: dict[Key, list[Stack]] = defaultdict(list)
        for stack in profile.main():
            places = enumerate(stack.frames)
            first = next((n for n, f in places if f.owner == "user" and _key(f) not in others), None)
            if stack.role not in WAITING and first is not None:
                stack.first = first
                through[_key(stack.frames[first])].append(stack)
        for stacks in through.values():
            own_s = sum(max(stack.raw.wall_s - stack.raw.queued_s - stack.raw.gil_s, 0.0) for stack in stacks)
            looks = sum(stack.raw.looks for stack in stacks)
            if own_s >= MIN_SHARE * profile.seconds and looks >= MIN_LOOKS:
                for stack in stacks:
                    stack.role = LONE


def _key(frame: Frame) -> Key:
    return frame.file, frame.line
