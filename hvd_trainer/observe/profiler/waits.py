"""Split the waiting for other ranks into its two causes: the exchange itself, and the slowest rank.

rank 0   computes  |  waits  waits  |  exchange |
rank 1   computes  computes  computes| exchange |       exchange = the shortest `reduce` of a step; what a
                                                        rank waits beyond that, it waits for that last rank
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from hvd_trainer.observe.step_timer import PARTS

REDUCE = PARTS.index("reduce")
WORK = [column for column, name in enumerate(PARTS) if name != "reduce"]


def exchange_s(seconds: Any) -> Any:
    """Return the seconds of each step's exchange itself, shape (steps,), from phases of shape (ranks, steps,
    parts).
    """
    return seconds[:, :, REDUCE].min(axis=0)


class Wait(NamedTuple):
    """One rank for another one, over some steps."""

    rank: int
    last: int
    """the rank that it waited for"""
    steps: int
    """in which that rank was the last"""
    mean_s: float
    """over all steps"""
    part: str
    """what the last rank did meanwhile, most of all"""
    longer_s: float
    """how much longer it took for that than this rank, over all steps"""


def waits(seconds: Any) -> list[Wait]:
    """Return who waited for whom, the longest first."""
    beyond = seconds[:, :, REDUCE] - exchange_s(seconds)
    lasts = seconds[:, :, REDUCE].argmin(axis=0)
    ranks, steps, _ = seconds.shape
    found = []
    for last in np.unique(lasts):
        where = lasts == last
        for rank in range(ranks):
            if rank == last:
                continue
            more = (seconds[last][where] - seconds[rank][where]).sum(axis=0) / steps
            part = max(WORK, key=more.__getitem__)
            found.append(
                Wait(rank, int(last), int(where.sum()), beyond[rank][where].sum() / steps, PARTS[part], more[part])
            )
    return sorted(found, key=lambda wait: -wait.mean_s)
