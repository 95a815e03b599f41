"""The ratio of two series that were measured in pairs, with a confidence interval.

The interval is the bootstrap's, by percentiles, over the rounds' ratios. With few rounds such intervals are too
narrow, since a sample's own spread is smaller than the population's; the levels are therefore widened by what
Student's t is wider than the normal distribution: the expanded percentile interval of T. Hesterberg, "What
Teachers Should Know About the Bootstrap", The American Statistician 69, 2015.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

CONFIDENCE = 0.95
RESAMPLES = 10_000
MIN_ROUNDS = 3
"""Rounds below which there is no interval."""


@dataclass(frozen=True)
class Ratio:
    """The ratio of two figures, and its 95 % confidence interval."""

    value: float
    """the median of the rounds' ratios"""
    low: float | None
    high: float | None
    """bounds of the 95 % interval; None with fewer than three rounds"""
    rounds: int

    @property
    def is_clear(self) -> bool:
        """Whether the two differ by more than the noise."""
        return self.low is not None and self.high is not None and not self.low <= 1 <= self.high


def ratio(ones: Sequence[float], others: Sequence[float]) -> Ratio:
    """Return the ratio of pairs of figures, one pair of each round.

    Args:
        ones, others: figures above 0, of the same rounds in the same order; at least one.
    """
    logs = np.log(np.asarray(ones, dtype=float) / np.asarray(others, dtype=float))
    value = median(math.exp(log) for log in logs.tolist())
    count = len(logs)
    if count < MIN_ROUNDS:
        return Ratio(value, None, None, count)
    # A fixed seed: the same measurements have the same interval each time they are shown.
    drawn = np.random.default_rng(0).choice(logs, (RESAMPLES, count))
    low, high = np.quantile(np.median(drawn, axis=1), interval_quantiles(count))
    return Ratio(value, math.exp(low), math.exp(high), count)


def interval_quantiles(count: int) -> tuple[float, float]:
    """Return the two quantiles that bound the interval of `count` values."""
    from scipy.stats import norm, t

    tail = (1 - CONFIDENCE) / 2
    low = float(norm.cdf(math.sqrt(count / (count - 1)) * t.ppf(tail, count - 1)))
    return low, 1 - low
