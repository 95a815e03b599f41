"""Costs from measured steps: least squares, with what is known beforehand as further measurements.

Measured steps rarely tell all costs apart: if an exchange is hidden, nobody sees how long it takes. A cost that
the points say nothing about must stay as uncertain as it was before, or intervals would be too narrow. So each
cost has a typical value and a width beforehand (`Prior`), which count as one measurement of it, and an interval
comes from the covariance of all of that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import inf, log
from typing import Any, NamedTuple

import numpy as np

from hvd_trainer.tools.estimate.model import Costs, Setup, step
from hvd_trainer.tools.estimate.points import Point

DRAWS = 400
"""Costs that are drawn from a fit for an interval."""
LEVEL = 0.9
"""Of all intervals here."""
LEAST_NOISE = 0.02
"""Of a step: what two runs of the same differ by anyway."""


class Prior(NamedTuple):
    """What is known of a cost before anything is measured."""

    typical: float
    width: float
    """one standard deviation"""
    low: float = 0.0
    high: float = inf


class Priors(NamedTuple):
    """One for each of the `Costs`."""

    fixed_s: Prior
    latency_s: Prior
    link_factor: Prior
    byte_s: Prior
    overlap: Prior
    rounds: Prior
    spread: Prior


CENTRE, BOUNDS = Prior._fields[:2], Prior._fields[2:]

LATENCY_US = 10.0
"""NCCL's own cost model has 9.6 us for a message of a ring between hosts (graph/tuning.cc of NCCL 2.8)."""
# NCCL over NVLink, and InfiniBand or RoCE between hosts. NVLink of a V100 moves some 50 GB/s. A rank's steps vary
# by a few percent: data, clocks, the system.
GPU = Priors(
    fixed_s=Prior(0.0, 2e-3),
    latency_s=Prior(LATENCY_US * 1e-6, 10e-6),
    link_factor=Prior(1.2, 0.4, low=1.0),
    byte_s=Prior(2e-11, 2e-11),
    overlap=Prior(0.9, 0.15, high=1.0),
    rounds=Prior(1.0, 1.0),
    spread=Prior(0.03, 0.02),
)
# Gloo over TCP: a message costs system calls and a thread's waking; a byte is copied and added up by the CPU,
# which computing needs as well.
CPU = Priors(
    fixed_s=Prior(0.0, 5e-3),
    latency_s=Prior(2e-4, 2e-4),
    link_factor=Prior(1.1, 0.3, low=1.0),
    byte_s=Prior(1e-9, 2e-9),
    overlap=Prior(0.5, 0.3, high=1.0),
    rounds=Prior(2.0, 4.0),
    spread=Prior(0.03, 0.03),
)


@dataclass(frozen=True)
class Fit:
    """Costs that suit some points best, and how sure they are."""

    costs: Costs
    covariance: Any
    """of the costs in widths of their priors: an array of shape (costs, costs)"""
    priors: Priors
    noise: float
    """of a step: by how much the points differ from the formula"""

    @cached_property
    def draws(self) -> list[Costs]:
        """Costs that could be as well; the same each time."""
        widths = np.array([prior.width for prior in self.priors])
        lows, highs = _bounds(self.priors)
        drawn = np.random.default_rng(0).multivariate_normal(np.zeros(len(widths)), self.covariance, DRAWS)
        values = np.clip(np.array(self.costs) + drawn * widths, lows, highs)
        return [Costs(*map(float, row)) for row in values]

    def knowing(self, name: str, value: float, doubt: float) -> Fit:
        """The same with a cost that is known better than the points tell.

        Args:
            doubt: the standard deviation of the value, as a part of it.
        """
        place, covariance = Costs._fields.index(name), self.covariance.copy()
        covariance[place, :] = covariance[:, place] = 0.0
        covariance[place, place] = (doubt * value / self.priors[place].width) ** 2
        return replace(self, costs=self.costs._replace(**{name: value}), covariance=covariance)


def fit(points: Sequence[Point], priors: Priors) -> Fit:
    """The costs that suit the points best; those of the priors if there are none.

    Errors are relative: a step of 10 ms counts as much as one of 10 s.
    """
    return _fitted(tuple(points), priors)


@cache
def _fitted(points: tuple[Point, ...], priors: Priors) -> Fit:
    found, covariance = _solve(points, priors, LEAST_NOISE)
    errors = [error(found, point) for point in points]
    noise = max(LEAST_NOISE, float(np.sqrt(np.mean(np.square(errors)))) if errors else 0.0)
    found, covariance = _solve(points, priors, noise)
    return Fit(found, covariance, priors, noise)


def error(costs: Costs, point: Point) -> float:
    """The logarithm of how many times as long a step is by the formula as it was."""
    return log(step(point.setup, costs).total_s / point.step_s)


def interval(setup: Setup, fitted: Fit, noise: float) -> tuple[float, float]:
    """The bounds between which `LEVEL` of the efficiencies lie that could be; none of them is above 1.

    Args:
        noise: by which a step is off besides: the standard deviation of its logarithm.
    """
    factors = np.exp(np.random.default_rng(1).normal(0.0, noise, DRAWS))
    could_be = np.array([step(setup, costs).efficiency for costs in fitted.draws]) * factors
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(could_be[could_be <= 1], (tail, 1 - tail))
    return float(low), float(high)


def _solve(points: Sequence[Point], priors: Priors, noise: float) -> tuple[Costs, Any]:
    from scipy.optimize import least_squares

    typical, widths = (np.array([getattr(prior, what) for prior in priors]) for what in CENTRE)
    lows, highs = _bounds(priors)

    def residuals(scaled: Any) -> Any:
        costs = Costs(*(scaled * widths).tolist())
        return np.array([*(error(costs, point) / noise for point in points), *(scaled - typical / widths)])

    # A start on a bound has no way to go.
    begin = np.clip(typical / widths, lows / widths + 1e-3, highs / widths - 1e-3)
    solved = least_squares(residuals, begin, bounds=(lows / widths, highs / widths), ftol=1e-6, xtol=1e-6)
    return Costs(*(solved.x * widths).tolist()), np.linalg.inv(solved.jac.T @ solved.jac)


def _bounds(priors: Priors) -> tuple[Any, Any]:
    lows, highs = (np.array([getattr(prior, what) for prior in priors]) for what in BOUNDS)
    return lows, highs
