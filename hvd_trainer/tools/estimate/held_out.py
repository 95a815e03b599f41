"""How wrong the model is about steps that it has not seen, and how wrong the plain linear guess is.

    tables      16 and 32 GPUs of a published table, from its 8 GPUs, which share a host
    large       512 GPUs on 25 Gbit/s, from all tables of 32 GPUs at most on 100 Gbit/s
    series      all of a series (a table, or one configuration that was measured here), from all others
    furthest    what was measured here on the most hosts, or over the slowest link, from all others

The linear guess is that n ranks are n times as fast as one. The harder one to beat begins with what is known of
the first host, too: that from there on nothing more is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from hvd_trainer.tools.estimate.fit import GPU, Priors, fit, interval
from hvd_trainer.tools.estimate.model import step
from hvd_trainer.tools.estimate.points import Point
from hvd_trainer.tools.estimate.published import LARGE, TABLES

CALIBRATED = 8
"""GPUs of a table that the model may see."""


@dataclass(frozen=True)
class Guess:
    """What the model says of a point that it was not fitted to."""

    point: Point
    efficiency: float
    low: float
    high: float
    linear: float = 1.0
    """the plain linear guess"""
    from_host: float | None = None
    """the linear guess from the first host on"""

    @property
    def error(self) -> float:
        """Of the speed: 0.1 is 10 % too fast."""
        return self.efficiency / self.point.efficiency - 1

    @property
    def linear_error(self) -> float:
        return self.linear / self.point.efficiency - 1

    @property
    def from_host_error(self) -> float | None:
        return None if self.from_host is None else self.from_host / self.point.efficiency - 1

    @property
    def is_inside(self) -> bool:
        return self.low <= self.point.efficiency <= self.high


@dataclass(frozen=True)
class Errors:
    """Of several guesses, in one line."""

    number: int
    median: float
    largest: float
    linear_median: float
    linear_largest: float
    inside: int
    """measured speeds within the guess's interval"""
    from_host_median: float | None
    """of the linear guess from the first host on, where there is one"""

    @classmethod
    def of(cls, guesses: Sequence[Guess]) -> Errors:
        ours, linear = ([abs(getattr(g, name)) for g in guesses] for name in ("error", "linear_error"))
        inside = sum(guess.is_inside for guess in guesses)
        from_host = [abs(guess.from_host_error) for guess in guesses if guess.from_host_error is not None]
        return cls(
            len(guesses),
            *(median(ours), max(ours), median(linear), max(linear)),
            inside,
            median(from_host) if from_host else None,
        )

    @property
    def is_better(self) -> bool:
        """Than the linear guess, at the median."""
        return self.median < self.linear_median


def guesses_of(
    unseen: Iterable[Point], seen: Sequence[Point], priors: Priors, from_host: float | None = None
) -> list[Guess]:
    """What the model says of some points, fitted to others."""
    fitted = fit(seen, priors)
    return [
        Guess(
            point,
            step(point.setup, fitted.costs).efficiency,
            *interval(point.setup, fitted, fitted.noise),
            from_host=from_host,
        )
        for point in unseen
    ]


def tables(engine: str) -> list[Guess]:
    """More than one host of each published table, from its first host."""
    found = []
    for series in TABLES:
        if series.engine == engine:
            (seen,) = (point for point in series.points if point.setup.ranks == CALIBRATED)
            unseen = [point for point in series.points if point.setup.ranks > CALIBRATED]
            found += guesses_of(unseen, [seen], GPU, seen.efficiency)
    return found


def large(engine: str) -> list[Guess]:
    """Hundreds of GPUs on a slower network, from the tables."""
    seen = [point for series in TABLES if series.engine == engine for point in series.points]
    unseen = [point for series in LARGE if series.engine == engine for point in series.points]
    return guesses_of(unseen, seen, GPU) if unseen else []


def by_series(points: Sequence[Point], priors: Priors) -> list[Guess]:
    """Each series from all others."""
    return [guess for one in dict.fromkeys(p.series for p in points) for guess in _without(points, priors, one)]


def furthest(points: Sequence[Point], priors: Priors) -> dict[str, list[Guess]]:
    """By what was left out; nothing where all points have the same."""
    places: dict[str, Callable[[Point], Any]] = {
        "the most hosts": lambda point: point.setup.hosts,
        "the slowest link": lambda point: -point.setup.link_gbit,
    }
    found = {}
    for name, place in places.items():
        edge = max(map(place, points))
        seen = [point for point in points if place(point) != edge]
        if seen:
            found[name] = guesses_of([point for point in points if place(point) == edge], seen, priors)
    return found


def unexplained(guesses: Sequence[Guess]) -> float:
    """By how much a step is off for each doubling of ranks: the standard deviation of its logarithm.

    So errors grow about a cluster that the model has not seen: 3 % with 4 GPUs, 4 to 9 with 16, 13 to 20 with 512.
    """
    off = [np.log1p(guess.error) / np.log2(guess.point.setup.ranks) for guess in guesses]
    return float(np.sqrt(np.mean(np.square(off))))


def _without(points: Sequence[Point], priors: Priors, series: str) -> list[Guess]:
    seen = [point for point in points if point.series != series]
    return guesses_of([point for point in points if point.series == series], seen, priors)
