"""Which of several settings is faster than the present ones, in as few runs as the noise allows. Pure.

All that are still in the race run once in each round, beside the present settings; the logarithm of the ratio of
their speeds is what is judged. A challenger is out as soon as it is certain not to gain what is worth having, and
has won as soon as it is certain to be faster. That is racing (O. Maron, A. Moore, "Hoeffding Races", NIPS 1993),
with Student's t for the intervals. To win, a challenger needs an interval with Bonferroni's correction for their
number; to be dropped, none, as that only loses a gain. The spread is taken from all challengers together, of this
race and those before whose steps are as long: it is the machine's, and each has few rounds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from statistics import fmean
from typing import Literal

DOUBT = 0.05
"""The probability with which a verdict may be wrong."""
FEWEST = 2
"""Rounds from which anybody is judged."""
Verdict = Literal["faster", "no faster", "open"]


@dataclass(frozen=True)
class Noise:
    """How much the ratio of two runs' speeds scatters on this machine, as a logarithm."""

    squares: float = 0.0
    freedom: int = 0
    """degrees of it"""

    def with_series(self, series: Sequence[Sequence[float]]) -> Noise:
        """Learns from the scatter of each series about its own mean."""
        squares, freedom = self.squares, self.freedom
        for values in series:
            mean = fmean(values) if values else 0.0
            squares += sum((value - mean) ** 2 for value in values)
            freedom += max(len(values) - 1, 0)
        return Noise(squares, freedom)

    @property
    def deviation(self) -> float:
        """The standard deviation of one ratio; infinite while nothing is known."""
        return math.sqrt(self.squares / self.freedom) if self.freedom else math.inf


@dataclass(frozen=True)
class Standing:
    """How a challenger stands beside the present settings."""

    verdict: Verdict
    speed: float
    """as a multiple of the present settings'; the mean of the rounds, geometric"""
    low: float
    high: float
    """bounds of its interval, the one that it would win by"""
    rounds: int


@dataclass
class Race:
    """One race; `note` the speeds of each round, until it `is_over`.

    Args:
        names: of the challengers.
        least_gain: below which a gain is not worth a search, as a fraction.
        rounds: after so many it is over, decided or not.
        noise: as it is known from before.
    """

    names: Sequence[str]
    least_gain: float
    rounds: int
    noise: Noise = field(default_factory=Noise)
    held: int = field(default=0, init=False)
    """rounds so far"""
    broken: set[str] = field(default_factory=set, init=False)
    """those that do not run"""

    def __post_init__(self) -> None:
        self._logs: dict[str, list[float]] = {name: [] for name in self.names}

    def note(self, present: float, speeds: Mapping[str, float | None]) -> None:
        """Takes a round's speeds; None: it does not run at all."""
        self.held += 1
        for name, speed in speeds.items():
            if speed is None:
                self.broken.add(name)
            else:
                self._logs[name].append(math.log(speed / present))

    def known_noise(self, names: Iterable[str] | None = None) -> Noise:
        """What is known from before, and from these challengers of this race; None: from all."""
        return self.noise.with_series([self._logs[name] for name in (self.names if names is None else names)])

    def standing(self, name: str) -> Standing:
        """By all rounds that it was in."""
        logs = self._logs[name]
        if name in self.broken:
            return Standing("no faster", 0.0, 0.0, 0.0, 0)
        if not logs:
            return Standing("open", 1.0, 0.0, math.inf, 0)
        mean, least = fmean(logs), math.log1p(self.least_gain)
        half = self._half_width(len(logs), DOUBT / 2 / len(self.names))
        verdict: Verdict = "open"
        if len(logs) >= FEWEST:
            if mean - half > 0 and mean > least:
                verdict = "faster"
            elif mean + self._half_width(len(logs), DOUBT) < least:
                verdict = "no faster"
        return Standing(verdict, _exp(mean), _exp(mean - half), _exp(mean + half), len(logs))

    def _half_width(self, rounds: int, tail: float) -> float:
        """Of an interval that the true mean is beyond, on one side, with the probability `tail`."""
        noise = self.known_noise()
        if not noise.freedom:
            return math.inf
        return _quantile(1 - tail, noise.freedom) * noise.deviation / math.sqrt(rounds)

    @property
    def running(self) -> list[str]:
        """Those that take part in the next round: none that are out, nor that are behind a certain winner.

        A winner runs on beside those that may be faster still.
        """
        standings = {name: self.standing(name) for name in self.names}
        left = [name for name, its in standings.items() if its.verdict != "no faster"]
        best = max((its.low for its in standings.values() if its.verdict == "faster"), default=0.0)
        return [name for name in left if standings[name].high > best]

    @property
    def is_over(self) -> bool:
        left = self.running
        decided = all(self.standing(name).verdict == "faster" for name in left) and len(left) <= 1
        return self.held >= self.rounds or decided

    @property
    def winner(self) -> str | None:
        """The fastest of those that are certainly faster than the present settings."""
        sure = [name for name in self.names if self.standing(name).verdict == "faster"]
        return max(sure, key=lambda name: self.standing(name).speed, default=None)


@cache
def _quantile(probability: float, freedom: int) -> float:
    """Of Student's t; it takes longer to compute than all else here."""
    from scipy.stats import t

    return float(t.ppf(probability, freedom))


def _exp(log: float) -> float:
    return math.exp(log) if log < 700 else math.inf
