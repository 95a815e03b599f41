"""What a row's ranks have shown: right, wrong, refused, or no such thing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Literal, NamedTuple

from benchmarks.idioms.libraries import Library
from benchmarks.idioms.ranks import Outcome, Start, run
from benchmarks.idioms.rows import ROWS

TOLERANCE = 1e-4
"""Ranks add the same numbers in another order, in fp32."""
ENDS_WITHIN_S = 5.0
"""after a SIGTERM, with the start and end of processes on a busy machine"""


class Verdict(NamedTuple):
    """Of one way of a library: a word, and numbers or the first line of an error."""

    word: Literal["right", "wrong", "refused", "no such thing"]
    detail: str = ""

    @property
    def text(self) -> str:
        """For a table's cell."""
        return f"{self.word} ({self.detail})" if self.detail else self.word


def judge(library: Library, row: str, way: str, sizes: Sequence[int], folder: Path) -> Verdict:
    """Run a row in one way on each number of ranks; return the first verdict that is not right."""
    ROWS[row]()  # An error of the row's own code is not the library's.
    first = Start(library.name, row, way, 1, 0, folder / "reference", is_reference=True)
    expected = ROWS[row].expected
    if expected is None and not ROWS[row].is_terminated:
        alone = run(first)
        if alone.error:
            return Verdict("refused", f"1 rank: {alone.error}")
        expected = alone.values[0]
    for start in _starts(first, sizes, folder):
        verdict = judge_outcome(row, run(start), expected)
        if verdict.word != "right":
            where = f"; {_count(start)}" if start.loader_processes else ""
            return Verdict("no such thing" if row in library.lacks else verdict.word, verdict.detail + where)
    return Verdict("right")


def _starts(first: Start, sizes: Sequence[int], folder: Path) -> Iterator[Start]:
    """Yield each number of ranks and of loader processes, but for what the reference has run."""
    row = ROWS[first.row]
    for size in sizes:
        for processes in row.loader_processes:
            if size == 1 and row.is_reference() and not processes:
                continue
            place = folder / f"{size}-{processes}"
            yield replace(first, size=size, loader_processes=processes, folder=place, is_reference=False)


def _count(start: Start) -> str:
    """Return the numbers of ranks and of each rank's loader processes, in words."""
    numbers = ((start.size, "rank"), (start.loader_processes, "worker"))
    return ", ".join(f"{number} {noun}{'s' * (number > 1)}" for number, noun in numbers)


def judge_outcome(row: str, outcome: Outcome, expected: Sequence[float] | None) -> Verdict:
    """Compare what the ranks of one start gave with the right values."""
    if ROWS[row].is_terminated and outcome.ended_s:
        is_right = outcome.is_saved and outcome.ended_s <= ENDS_WITHIN_S
        saved = "saved" if outcome.is_saved else "nothing saved"
        return Verdict("right" if is_right else "wrong", f"{saved}, ended after {outcome.ended_s:.1f} s")
    if outcome.error:
        return Verdict("wrong" if outcome.is_hung else "refused", outcome.error)
    right = [*(expected or ())]
    if ROWS[row].compare == "sum":
        return _judge_sum([sum(column) for column in zip(*outcome.values, strict=True)], right, ROWS[row].unit)
    return _judge_equal(outcome.values, right)


def _judge_sum(total: list[float], right: list[float], unit: str) -> Verdict:
    wrong = sum(abs(a - b) > TOLERANCE for a, b in zip(total, right, strict=True))
    if not wrong:
        return Verdict("right")
    if abs(sum(total) - sum(right)) > 0.5 and unit == "samples":
        return Verdict("wrong", f"{sum(total):.0f} samples, right {sum(right):.0f}")
    return Verdict("wrong", f"{wrong} of {len(right)} {unit}")


def _judge_equal(values: Sequence[Sequence[float]], right: list[float]) -> Verdict:
    if any(len(of_rank) != len(right) for of_rank in values):
        return Verdict("wrong", f"{len(values[0])} values, right {len(right)}")
    place, spread = _largest([max(column) - min(column) for column in zip(*values, strict=True)])
    if spread > TOLERANCE:
        numbers = ", ".join(f"{of_rank[place]:.4g}" for of_rank in values)
        return Verdict("wrong", f"ranks differ: {numbers}; right {right[place]:.4g}")
    place, error = _largest([abs(a - b) for a, b in zip(values[0], right, strict=True)])
    if error > TOLERANCE:
        return Verdict("wrong", f"{values[0][place]:.4g}, right {right[place]:.4g}")
    return Verdict("right")


def _largest(differences: Sequence[float]) -> tuple[int, float]:
    """Return the place of the largest, and its value; NaN is infinite."""
    sizes = [math.inf if math.isnan(size) else size for size in differences]
    return max(enumerate(sizes), key=itemgetter(1))
