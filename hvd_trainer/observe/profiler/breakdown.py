"""Where the time of the profiled steps went, as text.

Waiting for other ranks has two causes, the exchange itself and the slowest rank:

rank 0   computes  |  waits  waits  |  exchange |
rank 1   computes  computes  computes| exchange |       exchange = the shortest `reduce` of a step; what a
                                                        rank waits beyond that, it waits for that last rank
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from hvd_trainer.observe.phases import PARTS
from hvd_trainer.utils.text import plural

REDUCE = PARTS.index("reduce")
WORK = [column for column, name in enumerate(PARTS) if name != "reduce"]
OPERATORS = 10
ROWS = 8
"""Of ranks, on a terminal."""
WORTH_SAYING = 0.02
"""Of a step: who waited less for another one is not named."""


@dataclass(frozen=True)
class Figures:
    """The figures of one rank's recording, as sent to the other ranks."""

    host: str
    numbers: list[int]
    """of the steps"""
    window: tuple[int, int]
    """when recording them began and ended, in nanoseconds by this rank's clock"""
    seconds: Tensor
    """what they went to, shape (steps, parts)"""
    operators: dict[str, Counter[str]]
    unprofiled_s: float | None
    """the median step before they were recorded; None if there were too few"""


def breakdown(ranks: Sequence[Figures], *, whole: bool = True) -> list[str]:
    """Return the lines of the text.

    Args:
        ranks: what each has recorded.
        whole: have a row for each rank, however many there are.
    """
    seconds = np.stack([rank.seconds for rank in ranks])
    return [_heading(ranks, seconds), *_table(seconds, whole), *_waiting(seconds, whole), *_operators(ranks)]


def steps_of(ranks: Sequence[Figures]) -> str:
    """Return the numbers of the steps, such as `steps 5 to 9`."""
    first, last = ranks[0].numbers[0], ranks[0].numbers[-1]
    return f"step {first}" if first == last else f"steps {first} to {last}"


def _heading(ranks: Sequence[Figures], seconds: Any) -> str:
    took = float(np.median(seconds.sum(axis=2)))
    before = [rank.unprofiled_s for rank in ranks if rank.unprofiled_s is not None]
    compared = f", and {_ms(float(np.median(before)))} before the profiler ran" if before else ""
    return f"{steps_of(ranks)} of {plural(len(ranks), 'rank')}, in ms. The median step took {_ms(took)}{compared}"


def _table(seconds: Any, whole: bool) -> list[str]:
    means = seconds.mean(axis=1)
    means = np.column_stack([means, means.sum(axis=1)])
    rows = {f"rank {number}": row for number, row in enumerate(means) if whole or len(means) <= ROWS}
    if len(means) > 1:
        rows |= {"least": means.min(axis=0), "mean": means.mean(axis=0), "most": means.max(axis=0)}
    cells = [["mean of steps", *PARTS, "whole"], *([name, *map(_ms, row)] for name, row in rows.items())]
    return _align(cells)


def _waiting(seconds: Any, whole: bool) -> list[str]:
    if len(seconds) == 1:
        return []
    exchange, reduce = exchange_s(seconds).mean(), seconds[:, :, REDUCE].mean()
    step_s, steps = seconds.sum(axis=2).mean(), seconds.shape[1]
    lines = [
        f"of reduce, {_ms(exchange)} is the exchange itself, {_ms(reduce - exchange)} waiting for the last rank"
    ]
    found = [wait for wait in waits(seconds) if wait.mean_s > WORTH_SAYING * step_s]
    for wait in found if whole else found[:ROWS]:
        reason = (
            f", which had taken {_ms(wait.longer_s)} longer for {wait.part}"
            if wait.longer_s > wait.mean_s / 2
            else ""
        )
        lines.append(
            f"rank {wait.rank} waited {_ms(wait.mean_s)} for rank {wait.last}, the last one in {wait.steps} of "
            f"{plural(steps, 'step')}{reason}"
        )
    return lines


def _operators(ranks: Sequence[Figures]) -> list[str]:
    steps = len(ranks) * len(ranks[0].numbers)
    calls, host_us, device_us = (
        sum((rank.operators[kind] for rank in ranks), Counter()) for kind in ("calls", "host_us", "device_us")
    )
    times = {"CPU": host_us, "GPU": device_us} if device_us else {"CPU": host_us}
    cells = [["operators, own time", *times, "calls"]]
    for name in sorted(calls, key=lambda name: -(device_us or host_us)[name])[:OPERATORS]:
        own = (_ms(its[name] / steps / 1e6) for its in times.values())
        cells.append([name, *own, f"{round(calls[name] / steps, 1):g}"])
    return _align(cells)


def _align(cells: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))]
        )
        for first, *rest in cells
    ]


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.2f}"


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
