"""Where the time of the profiled steps went, as text.

Waiting for other ranks has two causes, the exchange itself and the slowest rank:

rank 0   computes  |  waits  waits  |  exchange |
rank 1   computes  computes  computes| exchange |       exchange = the shortest `reduce` of a step; what a
                                                        rank waits beyond that, it waits for that last rank
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from hvd_trainer.observe.phases import PARTS
from hvd_trainer.observe.profiler.operators import Operator
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
    seconds: Any
    """what they went to: NumPy, of shape (steps, parts)"""
    operators: dict[str, Operator]
    unprofiled_s: float | None
    """the median step before they were recorded; None if there were too few"""

    def to_plain(self) -> dict[str, Any]:
        """Return them as ranks send each other values."""
        operators = {name: tuple(operator) for name, operator in self.operators.items()}
        return {**vars(self), "seconds": torch.from_numpy(self.seconds), "operators": operators}

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> Figures:
        """Return the figures that `to_plain` has sent."""
        operators = {name: Operator(*operator) for name, operator in values["operators"].items()}
        return cls(**{**values, "seconds": values["seconds"].numpy(), "operators": operators})


def breakdown(ranks: Sequence[Figures], *, whole: bool = True) -> list[str]:
    """Return the lines of the text.

    Args:
        ranks: what each has recorded.
        whole: have a row for each rank, however many there are.
    """
    return [_heading(ranks), *_table(ranks, whole), *_waiting(ranks, whole), *_operators(ranks)]


def steps_of(ranks: Sequence[Figures]) -> str:
    """Return the numbers of the steps, such as `steps 5 to 9`."""
    first, last = ranks[0].numbers[0], ranks[0].numbers[-1]
    return f"step {first}" if first == last else f"steps {first} to {last}"


def _heading(ranks: Sequence[Figures]) -> str:
    took = float(np.median([rank.seconds.sum(axis=1) for rank in ranks]))
    before = [rank.unprofiled_s for rank in ranks if rank.unprofiled_s is not None]
    compared = f", and {_ms(float(np.median(before)))} before the profiler ran" if before else ""
    return f"{steps_of(ranks)} of {plural(len(ranks), 'rank')}, in ms. The median step took {_ms(took)}{compared}"


def _table(ranks: Sequence[Figures], whole: bool) -> list[str]:
    means = np.stack([rank.seconds.mean(axis=0) for rank in ranks])
    means = np.column_stack([means, means.sum(axis=1)])
    rows = {f"rank {number}": row for number, row in enumerate(means)}
    if not whole and len(ranks) > ROWS:
        rows = {}
    if len(ranks) > 1:
        rows |= {"least": means.min(axis=0), "mean": means.mean(axis=0), "most": means.max(axis=0)}
    cells = [["mean of steps", *PARTS, "whole"], *([name, *map(_ms, row)] for name, row in rows.items())]
    return _align(cells)


def _waiting(ranks: Sequence[Figures], whole: bool) -> list[str]:
    if len(ranks) == 1:
        return []
    seconds = np.stack([rank.seconds for rank in ranks])
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
    total: dict[str, Operator] = {}
    for rank in ranks:
        for name, its in rank.operators.items():
            total[name] = total.get(name, Operator()).plus(its)
    on_device = any(its.device_us for its in total.values())
    column = Operator._fields.index("device_us" if on_device else "host_us")
    cells = [["operators, own time", "CPU", *(["GPU"] if on_device else []), "calls"]]
    for name, its in sorted(total.items(), key=lambda entry: -entry[1][column])[:OPERATORS]:
        times = [its.host_us, *([its.device_us] if on_device else [])]
        cells.append([name, *(_ms(micro / steps / 1e6) for micro in times), f"{round(its.calls / steps, 1):g}"])
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
