"""Measure the error of the model, and of the linear guess, on steps that the model was not fitted to.

    tables      16 and 32 GPUs of a published table, from its 8 GPUs, which share a host
    large       512 GPUs on 25 Gbit/s, from all tables of 32 GPUs at most on 100 Gbit/s
    series      all of a series (a table, or one configuration that was measured here), from all others
    furthest    what was measured here on the most hosts, or over the slowest link, from all others

The linear guess is that n ranks are n times as fast as one. One that is harder to beat starts at the measured
efficiency of the first host, and guesses that further hosts lose nothing more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from hvd_trainer.tools.estimate.fit import fit, interval
from hvd_trainer.tools.estimate.model import predict_step
from hvd_trainer.tools.estimate.points import Measured, Point, published_points, published_series

CALIBRATION_GPUS = 8
"""The number of GPUs of a table's point that the model is fitted to."""
MIN_LARGE_GPUS = 512
"""The number of GPUs that is guessed from tables of few."""


@dataclass(frozen=True)
class Guess:
    """The model's guess about a point that it was not fitted to; errors are relative: 0.1 is 10 % too fast."""

    point: Point
    efficiency: float
    low: float
    high: float
    from_host: float | None = None
    """the linear guess from the first host on"""

    @property
    def error(self) -> float:
        return self.efficiency / self.point.efficiency - 1

    @property
    def linear_error(self) -> float:
        return 1 / self.point.efficiency - 1

    @property
    def from_host_error(self) -> float | None:
        return None if self.from_host is None else self.from_host / self.point.efficiency - 1


class Errors(NamedTuple):
    """The errors of several guesses."""

    number: int
    median: float
    largest: float
    linear_median: float
    linear_largest: float
    inside: int
    """number of measured speeds within the guess's interval"""
    from_host_median: float | None
    """median error of the linear guess from the first host on; None where there is none"""

    @classmethod
    def summarize(cls, guesses: Sequence[Guess]) -> Errors:
        """Summarize the errors of guesses."""
        ours, linear = ([abs(getattr(g, name)) for g in guesses] for name in ("error", "linear_error"))
        inside = sum(guess.low <= guess.point.efficiency <= guess.high for guess in guesses)
        from_host = [abs(guess.from_host_error) for guess in guesses if guess.from_host_error is not None]
        of_host = median(from_host) if from_host else None
        return cls(len(guesses), median(ours), max(ours), median(linear), max(linear), inside, of_host)

    @property
    def is_better(self) -> bool:
        """Whether the model is better than the linear guess, at the median."""
        return self.median < self.linear_median


class Trial(NamedTuple):
    """Guesses whose errors are summarized together."""

    title: str
    guesses: Sequence[Guess]
    is_published: bool = False


def run_trials(engines: Sequence[str], measured: Measured) -> list[Trial]:
    """Let the model guess published points and measured ones that it was not fitted to."""
    found = []
    for engine in engines:
        found.append(Trial(f"{engine}, published, from the same table's 8 GPUs", guess_tables(engine), True))
        found.append(Trial(f"{engine}, published, 512 GPUs from tables of 32", guess_large(engine), True))
        points, device = measured.points_of(engine), measured.device
        if len(points) > 1:
            found.append(Trial(f"{engine}, measured, each set-up from all others", guess_groups(points, device)))
            edges = guess_extremes(points, device)
            found += [Trial(f"{engine}, measured, {name} from all others", its) for name, its in edges.items()]
    return [trial for trial in found if trial.guesses]


def guess_points(
    unseen: Iterable[Point], seen: Iterable[Point], device: str, from_host: float | None = None
) -> list[Guess]:
    """Guess the efficiency of points by a fit to others."""
    its = fit(tuple(seen), device)
    found = []
    for point in unseen:
        low, high = interval(point.setup, its, its.noise)
        found.append(Guess(point, predict_step(point.setup, its.costs).efficiency, low, high, from_host))
    return found


def guess_tables(engine: str) -> list[Guess]:
    """Guess the points of each published table on several hosts from its first host."""
    found = []
    for series in published_series():
        unseen = [point for point in series.points if point.setup.ranks > CALIBRATION_GPUS]
        for seen in series.points:
            if series.engine == engine and seen.setup.ranks == CALIBRATION_GPUS:
                found += guess_points(unseen, [seen], "gpu", seen.efficiency)
    return found


def guess_large(engine: str) -> list[Guess]:
    """Guess hundreds of GPUs on a slower network from the tables."""
    return _guess_group(published_points(engine), "gpu", lambda point: point.setup.ranks >= MIN_LARGE_GPUS)


def guess_groups(
    points: Sequence[Point], device: str, group: Callable[[Point], Any] = attrgetter("series")
) -> list[Guess]:
    """Guess each group of points, by default each series, from all others."""
    found = []
    for value in dict.fromkeys(map(group, points)):
        seen = (point for point in points if group(point) != value)
        found += guess_points((point for point in points if group(point) == value), seen, device)
    return found


def guess_extremes(points: Sequence[Point], device: str) -> dict[str, list[Guess]]:
    """Guess the points with the most hosts, and with the slowest link, from all others.

    Return the guesses by what was left out; nothing where all points have the same.
    """
    most, slowest = max(p.setup.hosts for p in points), min(p.setup.link_gbit for p in points)
    found = {
        "the most hosts": _guess_group(points, device, lambda point: point.setup.hosts == most),
        "the slowest link": _guess_group(points, device, lambda point: point.setup.link_gbit == slowest),
    }
    return {name: guesses for name, guesses in found.items() if len(guesses) < len(points)}


def unexplained_error(guesses: Sequence[Guess]) -> float:
    """Return the standard deviation of the logarithm of a step's error, per doubling of ranks.

    Errors grow so on a cluster without points: 3 % with 4 GPUs, 4 to 9 % with 16, 13 to 20 % with 512.
    """
    off = [np.log1p(guess.error) / np.log2(guess.point.setup.ranks) for guess in guesses]
    return float(np.sqrt(np.mean(np.square(off))))


def _guess_group(points: Sequence[Point], device: str, is_unseen: Callable[[Point], bool]) -> list[Guess]:
    """Guess the points of a group from all others."""
    unseen = [point for point in points if is_unseen(point)]
    return guess_points(unseen, (point for point in points if not is_unseen(point)), device)
