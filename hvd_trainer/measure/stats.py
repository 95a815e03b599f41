"""How much faster one way to run a job is than another, with a confidence interval.

Both are measured in rounds, one beside the other, so that a drift of the machine is in both. Each round gives the
logarithm of the ratio of the two speeds; by Student's t these have a mean with an interval, which become the
geometric mean of the ratios and its bounds. With three rounds the interval is wide, as it must be: one by the
bootstrap cannot leave its sample, and holds the true ratio in 73 of 100 cases instead of 95.

Among many ratios some differ from 1 by chance. `ratios` gives those that are looked at together such levels that
all their verdicts are right with 95 %: Holm's correction (S. Holm, "A Simple Sequentially Rejective Multiple Test
Procedure", Scandinavian Journal of Statistics 6, 1979).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import fmean
from typing import Any

import numpy as np

ERROR = 0.05
"""The probability with which a verdict, or all verdicts of a table, may be wrong."""
MIN_ROUNDS = 3
"""Rounds below which there is no interval."""
METHOD = "Intervals: Student's t on the logarithms of the rounds' ratios"
"""The method, for reports."""


@dataclass(frozen=True)
class Ratio:
    """The ratio of two figures, with its confidence interval."""

    value: float
    """the geometric mean of the rounds' ratios"""
    low: float | None
    high: float | None
    """bounds of the interval; None with fewer than three rounds"""
    rounds: int
    level: float = 1 - ERROR
    """of the interval; above 95 % where several ratios are looked at together"""
    each: tuple[float, ...] = ()
    """the ratio of each round"""
    least: float = 0.0
    """the smallest difference from 1 that matters, as a fraction"""

    @property
    def is_clear(self) -> bool:
        """Whether the two differ by more than the noise."""
        return self.low is not None and self.high is not None and not self.low <= 1 <= self.high

    @property
    def matters(self) -> bool:
        """Whether the two differ by more than the noise, and by as much as counts."""
        return self.is_clear and abs(math.log(self.value)) >= math.log1p(self.least)

    @property
    def is_negligible(self) -> bool:
        """Whether the whole interval is within what counts."""
        bounds = (self.low, self.high)
        return all(bound is not None and abs(math.log(bound)) < math.log1p(self.least) for bound in bounds)

    @property
    def evidence(self) -> tuple[float, float]:
        """How far it is from 1: in widths of its interval, of which it may have none, and by itself."""
        size = abs(math.log(self.value))
        width = math.inf if self.low is None or self.high is None else math.log(self.high / self.low)
        return size / max(width, 1e-12), size

    @property
    def inverse(self) -> Ratio:
        """The ratio of the second figure to the first."""
        low, high = (None if bound is None else 1 / bound for bound in (self.high, self.low))
        each = tuple(1 / value for value in self.each)
        return replace(self, value=1 / self.value, low=low, high=high, each=each)

    @property
    def badge(self) -> str:
        """It in a few words."""
        if self.low is None:
            return "TOO FEW ROUNDS"
        if not self.matters:
            return "NO DIFFERENCE THAT MATTERS" if self.is_negligible else "NO CLEAR DIFFERENCE"
        return f"{self.value:.2f} TIMES [{self.low:.2f} to {self.high:.2f}]"

    @property
    def interval(self) -> str:
        """The interval with its level, in words."""
        if self.low is None or self.high is None:
            return "no interval"
        digits = 3 if abs(self.value - 1) < self.least else 2
        return f"{100 * self.level:.3g} % interval {self.low:.{digits}f} to {self.high:.{digits}f}"


def ratio(ones: Sequence[float], others: Sequence[float]) -> Ratio:
    """Return the ratio of pairs of figures, one pair of each round, with its 95 % interval.

    Args:
        ones, others: figures above 0, of the same rounds in the same order; at least one.
    """
    return ratios([(ones, others)])[0]


def ratios(pairs: Sequence[tuple[Sequence[float], Sequence[float]]], *, least: float = 0.0) -> list[Ratio]:
    """Return the ratio of each pair of series, as `ratio` does, with Holm's correction for their number.

    The clearest is judged with an error of 5 % divided by the number of all, the next by that of the others, and
    so on until one is not clear; the rest is judged like that one.
    """
    logs = [np.log(np.asarray(ones, dtype=float) / np.asarray(others, dtype=float)) for ones, others in pairs]
    results = [
        Ratio(math.exp(values.mean()), None, None, len(values), each=tuple(np.exp(values).tolist()), least=least)
        for values in logs
    ]
    tests = {place: t_test(values) for place, values in enumerate(logs) if len(values) >= MIN_ROUNDS}
    left = len(tests)
    # Rounds that are all equal have no p-value.
    for place, test in sorted(tests.items(), key=lambda item: np.nan_to_num(item[1].pvalue, nan=1.0)):
        error = ERROR / left
        bounds = test.confidence_interval(1 - error)
        results[place] = replace(
            results[place], low=math.exp(bounds.low), high=math.exp(bounds.high), level=1 - error
        )
        left -= results[place].is_clear
    return results


def t_test(logs: Any) -> Any:
    """Return Student's t test of the mean of each series, of shape (..., rounds), with its interval."""
    from scipy.stats import ttest_1samp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of rounds that are all equal
        return ttest_1samp(logs, 0.0, axis=-1)


def pool(series: Sequence[Sequence[float]]) -> tuple[float, int]:
    """Return the standard deviation of values around the mean of their own series, and its degrees of freedom.

    Infinite without two values of a series.
    """
    squares = sum((value - fmean(values)) ** 2 for values in series for value in values)
    freedom = sum(max(len(values) - 1, 0) for values in series)
    return math.sqrt(squares / freedom) if freedom else math.inf, freedom


@cache
def t_quantile(probability: float, freedom: int) -> float:
    """Return a quantile of Student's t; cached, since it takes longer to compute than everything else here."""
    from scipy.stats import t

    return float(t.ppf(probability, freedom))
