"""Race several settings against the present ones, in as few runs as the noise allows. Pure functions.

All candidates that are still in the race run once in each round, beside the present settings; the logarithm of the
ratio of their speeds decides. A candidate is out as soon as it certainly gains less than the least gain, and has
won as soon as it is certainly faster. That is racing (O. Maron, A. Moore, "Hoeffding Races", NIPS 1993), with
Student's t for the intervals. To win, a candidate needs an interval with Bonferroni's correction for their number;
to be dropped, none, as that only loses a gain. The variance is pooled over all candidates, of this race and those
before whose steps are as long: it is the machine's, and each candidate has few rounds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Literal

from hvd_trainer.measure.stats import ERROR, interval_text, pool, t_quantile

MIN_ROUNDS = 2
"""Rounds before a candidate gets a verdict."""
Verdict = Literal["faster", "no faster", "open"]


@dataclass(frozen=True)
class Standing:
    """The result of a candidate so far, beside the present settings."""

    verdict: Verdict
    speed: float
    """as a multiple of the present settings' speed; the geometric mean of the rounds"""
    low: float
    high: float
    """bounds of the interval that decides whether it wins"""
    rounds: int
    level: float = 1 - ERROR
    """of the interval, which is above 95 % where there are several candidates"""

    @property
    def interval(self) -> str:
        return interval_text(self.low, self.high, self.level)


@dataclass
class Race:
    """A race: call `note` with the speeds of each round until `is_over`.

    Args:
        names: of the candidates.
        least_gain: below which a gain is not worth a search, as a fraction.
        rounds: after which it is over, decided or not.
        before: the logarithms of earlier races, whose noise is the same.
    """

    names: Sequence[str]
    least_gain: float
    rounds: int
    before: Sequence[Sequence[float]] = ()
    held: int = field(default=0, init=False)
    """rounds that were held"""
    broken: set[str] = field(default_factory=set, init=False)
    """candidates with which the job does not run"""

    def __post_init__(self) -> None:
        self.logs: dict[str, list[float]] = {name: [] for name in self.names}
        """logarithms of the rounds' ratios"""

    def note(self, present: float, speeds: Mapping[str, float | None]) -> None:
        """Add the speeds of a round; None if the job does not run with a candidate."""
        self.held += 1
        for name, speed in speeds.items():
            if speed is None:
                self.broken.add(name)
            else:
                self.logs[name].append(math.log(speed / present))

    def standing(self, name: str) -> Standing:
        """Return the result of a candidate over all its rounds."""
        logs = self.logs[name]
        if name in self.broken:
            return Standing("no faster", 0.0, 0.0, 0.0, 0)
        if not logs:
            return Standing("open", 1.0, 0.0, math.inf, 0)
        deviation, freedom = pool([*self.before, *self.logs.values()])
        error, mean, least = ERROR / len(self.names), fmean(logs), math.log1p(self.least_gain)
        if not freedom:
            return Standing("open", math.exp(mean), 0.0, math.inf, len(logs), 1 - error)
        scale = deviation / math.sqrt(len(logs))
        half = t_quantile(1 - error / 2, freedom) * scale
        verdict: Verdict = "open"
        if len(logs) >= MIN_ROUNDS:
            if mean - half > 0 and mean > least:
                verdict = "faster"
            elif mean + t_quantile(1 - ERROR, freedom) * scale < least:
                verdict = "no faster"
        bounds = math.exp(mean - half), math.exp(min(mean + half, 700))
        return Standing(verdict, math.exp(mean), *bounds, len(logs), 1 - error)

    @property
    def running(self) -> list[str]:
        """The candidates of the next round: those that are not out, and not certainly slower than a winner.

        A winner runs on beside those that may be faster still.
        """
        standings = {name: self.standing(name) for name in self.names}
        best = max((s.low for s in standings.values() if s.verdict == "faster"), default=0.0)
        return [name for name, s in standings.items() if s.verdict != "no faster" and s.high > best]

    @property
    def is_over(self) -> bool:
        left = self.running
        return self.held >= self.rounds or not left or left == [self.winner]

    @property
    def winner(self) -> str | None:
        """The fastest of the candidates that are certainly faster than the present settings."""
        sure = [name for name in self.names if self.standing(name).verdict == "faster"]
        return max(sure, key=lambda name: self.standing(name).speed, default=None)
