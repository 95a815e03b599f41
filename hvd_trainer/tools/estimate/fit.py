"""Fit costs to measured steps by least squares, with prior knowledge as further measurements.

Measured steps rarely determine all costs: the time of a hidden exchange, for one, does not show in them. A cost
that the points do not determine must stay as uncertain as before, or intervals would be too narrow. So each cost
has a typical value and a width (`Prior`), which count as one measurement of it, and an interval follows from the
covariance of points and priors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import inf, log
from typing import Any, NamedTuple

import numpy as np

from hvd_trainer.tools.estimate.model import Costs, Setup, predict_step
from hvd_trainer.tools.estimate.points import Point

NUM_DRAWS = 400
"""The number of costs that are drawn from a fit for an interval."""
INTERVAL_LEVEL = 0.9
"""The probability that all intervals of this tool have."""
MIN_NOISE = 0.02
"""The relative difference between steps of two equal runs."""


class Prior(NamedTuple):
    """The knowledge of a cost before any measurement."""

    typical: float
    width: float
    """one standard deviation"""
    low: float = 0.0
    high: float = inf


LATENCY_US = 10.0
"""NCCL's own cost model has 9.6 us for a message of a ring between hosts (graph/tuning.cc of NCCL 2.8)."""
PRIORS = {
    # NCCL over NVLink, and InfiniBand or RoCE between hosts. NVLink of a V100 moves some 50 GB/s. A rank's steps
    # vary by a few percent: data, clocks, the system.
    "gpu": {
        "fixed_s": Prior(0.0, 2e-3),
        "latency_s": Prior(LATENCY_US * 1e-6, 10e-6),
        "link_factor": Prior(1.2, 0.4, low=1.0),
        "byte_s": Prior(2e-11, 2e-11),
        "overlap": Prior(0.9, 0.15, high=1.0),
        "rounds": Prior(1.0, 1.0),
        "spread": Prior(0.03, 0.02),
    },
    # Gloo over TCP: a message costs system calls and a thread's waking; a byte is copied and added up by the CPU,
    # which computing needs as well.
    "cpu": {
        "fixed_s": Prior(0.0, 5e-3),
        "latency_s": Prior(2e-4, 2e-4),
        "link_factor": Prior(1.1, 0.3, low=1.0),
        "byte_s": Prior(1e-9, 2e-9),
        "overlap": Prior(0.5, 0.3, high=1.0),
        "rounds": Prior(2.0, 4.0),
        "spread": Prior(0.03, 0.03),
    },
}
"""Prior distribution of each of the `Costs`, by the ranks' device."""


def _priors(device: str) -> Any:
    """Return the priors as an array of shape (4, costs): typical values, widths, lower and upper bounds."""
    return np.array([PRIORS[device][name] for name in Costs._fields]).T


@dataclass(frozen=True)
class Fit:
    """The costs that fit some points best, and their uncertainty."""

    costs: Costs
    covariance: Any
    """covariance of the costs in widths of their priors: an array of shape (costs, costs)"""
    device: str
    noise: float
    """root mean square of the points' `log_error`; at least `MIN_NOISE`"""

    @cached_property
    def draws(self) -> list[Costs]:
        """Costs drawn from the fit's distribution, with a fixed seed."""
        _, widths, lows, highs = _priors(self.device)
        drawn = np.random.default_rng(0).multivariate_normal(np.zeros(len(widths)), self.covariance, NUM_DRAWS)
        values = np.clip(np.array(self.costs) + drawn * widths, lows, highs)
        return [Costs(*map(float, row)) for row in values]

    def with_known(self, name: str, value: float, uncertainty: float) -> Fit:
        """Return this fit with one cost set to a value that is known better than from the points.

        Args:
            uncertainty: the standard deviation of the value, divided by the value.
        """
        place, covariance = Costs._fields.index(name), self.covariance.copy()
        covariance[place, :] = covariance[:, place] = 0.0
        covariance[place, place] = (uncertainty * value / PRIORS[self.device][name].width) ** 2
        return replace(self, costs=self.costs._replace(**{name: value}), covariance=covariance)


@cache
def fit(points: tuple[Point, ...], device: str) -> Fit:
    """Return the costs that fit the points best; without points those of the priors.

    Errors are relative: a step of 10 ms counts as much as one of 10 s.
    """
    found, _ = _solve(points, device, MIN_NOISE)
    errors = [log_error(found, point) for point in points]
    noise = max(MIN_NOISE, float(np.sqrt(np.mean(np.square(errors)))) if errors else 0.0)
    return Fit(*_solve(points, device, noise), device, noise)


def log_error(costs: Costs, point: Point) -> float:
    """Return the logarithm of a step's predicted time divided by its measured time."""
    return log(predict_step(point.setup, costs).total_s / point.step_s)


def interval(setup: Setup, fitted: Fit, noise: float) -> tuple[float, float]:
    """Return the bounds of the interval that has `INTERVAL_LEVEL` of the possible efficiencies; none is above 1.

    Args:
        noise: the standard deviation of the logarithm of a step's further error.
    """
    factors = np.exp(np.random.default_rng(1).normal(0.0, noise, NUM_DRAWS))
    could_be = np.array([predict_step(setup, costs).efficiency for costs in fitted.draws]) * factors
    tail = (1 - INTERVAL_LEVEL) / 2
    low, high = np.quantile(could_be[could_be <= 1], (tail, 1 - tail))
    return float(low), float(high)


def _solve(points: Sequence[Point], device: str, noise: float) -> tuple[Costs, Any]:
    from scipy.optimize import least_squares

    typical, widths, lows, highs = _priors(device)

    def residuals(scaled: Any) -> Any:
        costs = Costs(*(scaled * widths).tolist())
        return np.array([*(log_error(costs, point) / noise for point in points), *(scaled - typical / widths)])

    # least_squares needs a start inside of the bounds.
    begin = np.clip(typical / widths, lows / widths + 1e-3, highs / widths - 1e-3)
    solved = least_squares(residuals, begin, bounds=(lows / widths, highs / widths), ftol=1e-6, xtol=1e-6)
    return Costs(*(solved.x * widths).tolist()), np.linalg.inv(solved.jac.T @ solved.jac)
