"""Intervals of ratios: how often they hold the true one, and how often equal engines get a winner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hvd_trainer.measure.stats import Ratio, ratio, ratios, t_test

TIMES = 20_000
"""Simulated comparisons, by which a share of 5 % is known to 0.15 %."""
Draw = Callable[[np.random.Generator, tuple[int, int]], Any]


def gaussian(rng: np.random.Generator, shape: tuple[int, int]) -> Any:
    """Draw times of runs that scatter by 5 %."""
    return 1 + 0.05 * rng.normal(size=shape)


def log_normal(rng: np.random.Generator, shape: tuple[int, int]) -> Any:
    """Draw times of runs of which a few take much longer."""
    return 1 + 0.05 * rng.lognormal(0, 1, shape)


def exponential(rng: np.random.Generator, shape: tuple[int, int]) -> Any:
    """Draw times of runs that other programs delay."""
    return 1 + 0.1 * rng.exponential(size=shape)


def steady(rng: np.random.Generator, shape: tuple[int, int]) -> Any:
    """Return times that do not scatter."""
    return np.ones(shape)


@pytest.mark.parametrize("rounds", range(3, 11))
@pytest.mark.parametrize(
    ("one", "other", "between"),
    [
        # Of equal engines, what is not covered is a winner: by the bootstrap, in 27 of 100 comparisons.
        (gaussian, gaussian, (0.94, 0.97)),
        # Delays of both are symmetric in the logarithm of the ratio.
        (exponential, exponential, (0.94, 0.98)),
        (log_normal, log_normal, (0.94, 0.985)),
        (gaussian, exponential, (0.92, 0.97)),
        (gaussian, log_normal, (0.91, 0.97)),
        # The worst: one alone is delayed, and a few rounds do not show how long the rare delays are.
        (steady, exponential, (0.87, 0.93)),
        (steady, log_normal, (0.82, 0.89)),
    ],
)
def test_interval_holds_the_true_ratio(one: Draw, other: Draw, between: tuple[float, float], rounds: int) -> None:
    """The bootstrap's held it in 73 of 100 cases with three rounds."""
    rng = np.random.default_rng(rounds)
    logs = np.log(other(rng, (TIMES, rounds)) / one(rng, (TIMES, rounds)))
    many = (10**5, 1)
    truth = np.log(other(rng, many) / one(rng, many)).mean()
    bounds = t_test(logs).confidence_interval(0.95)
    covered = ((bounds.low <= truth) & (truth <= bounds.high)).mean()
    assert between[0] <= covered <= between[1]


def test_ratio_has_the_mean_and_the_interval_of_its_logarithms() -> None:
    ones, others = [110.0, 111, 109, 112, 110], [100.0, 100, 100, 101, 100]
    logs = np.log(np.array(ones) / np.array(others))
    mean, half = logs.mean(), 2.776 * logs.std(ddof=1) / 5**0.5  # of Student's t with 4 degrees of freedom
    clear = ratio(ones, others)
    wanted = np.exp([mean, mean - half, mean + half])
    assert (clear.value, clear.low, clear.high) == pytest.approx(wanted, rel=1e-5)
    assert (clear.is_clear, clear.rounds, clear.level) == (True, 5, 0.95)
    assert clear.interval == "95 % interval 1.09 to 1.11"
    assert not ratio([110, 90, 105, 95, 100], [100, 100, 100, 100, 100]).is_clear
    assert ratio([3, 3, 3], [2, 2, 2]).is_clear
    assert not ratio([2, 2, 2], [2, 2, 2]).is_clear
    few = ratio([2.0, 2.0], [1.0, 1.0])
    assert (few.value, few.low, few.is_clear, few.interval) == (pytest.approx(2), None, False, "no interval")
    assert ratio(others, ones).value == pytest.approx(clear.inverse.value)
    assert ratio(others, ones).high == pytest.approx(clear.inverse.high)


def test_ratios_are_corrected_for_their_number() -> None:
    """Ten pairs of equal engines: without a correction 40 of 100 tables have a winner."""
    rng = np.random.default_rng(0)

    def table() -> list[Ratio]:
        return ratios([tuple(gaussian(rng, (2, 5))) for _ in range(10)])

    assert np.mean([any(one.is_clear for one in table()) for _ in range(400)]) <= 0.075


def test_level_of_each_ratio_follows_holm() -> None:
    """The clearest has the widest interval; what is not clear is so by the interval that is shown."""
    noise = np.array([0.99, 1.0, 1.01, 1.0, 1.0])
    same, huge, large = ratios([(1 / noise, noise), (2 * noise, noise**2), (1.3 * noise**2, noise)])
    assert [one.is_clear for one in (same, huge, large)] == [False, True, True]
    assert sorted(1 - one.level for one in (huge, large)) == pytest.approx([0.05 / 3, 0.05 / 2])
    assert same.level == pytest.approx(0.95)
    assert ratios([(noise, noise), ([1.0], [2.0])])[0].level == 0.95, "one round alone is not judged"
