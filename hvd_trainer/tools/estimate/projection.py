"""Project a job and an engine's costs to efficiencies on 1, 2, 4, ... hosts, with intervals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import inf, log2

from hvd_trainer.tools.estimate.fit import CPU_PRIORS, GPU_PRIORS, Fit, fit, interval
from hvd_trainer.tools.estimate.held_out import Guess, guess_extremes, guess_groups, unexplained_error
from hvd_trainer.tools.estimate.model import Setup, Step, predict_step
from hvd_trainer.tools.estimate.points import SENT_FRACTION, Measured, count_pieces
from hvd_trainer.tools.estimate.published import published_points, published_series
from hvd_trainer.tools.estimate.scope import PUBLISHED_REACH, Scope, measured_reach
from hvd_trainer.tools.estimate.workload import Job

MAX_NEAR_RATIO = 2.0
"""A published figure is shown beside a projection if their gradients per second of computing differ by less."""
LOSS_NAMES = {
    "fixed_s": "what the engine costs per step",
    "latency_s": "the latency of messages",
    "bandwidth_s": "the bandwidth",
    "straggler_s": "the slowest rank",
}


@dataclass(frozen=True)
class Row:
    """The projection of one engine on one number of hosts."""

    engine: str
    setup: Setup
    step: Step
    """by the formula, even if the efficiency cannot be known"""
    low: float
    high: float
    reasons: Sequence[str]
    """why it cannot be known; empty if it can"""
    published: Sequence[str]
    """published figures of similar set-ups"""

    @property
    def is_known(self) -> bool:
        return not self.reasons

    @property
    def limited_by(self) -> str | None:
        """The part that takes most of the lost time, and its fraction of a step; None if nothing is lost."""
        lost = {name: getattr(self.step, name) for name in LOSS_NAMES}
        name = max(lost, key=lost.__getitem__)
        return f"{LOSS_NAMES[name]}, {lost[name] / self.step.total_s:.1%}" if lost[name] > 0 else None


@dataclass(frozen=True)
class Basis:
    """The fit and the scope from which an engine's projection follows."""

    engine: str
    fitted: Fit
    scope: Scope
    unexplained_error: float
    """standard deviation of the logarithm of a step's error, per doubling of ranks"""

    def uncertainty(self, setup: Setup) -> float:
        """Return the standard deviation of the logarithm of a step's time; doublings beyond the scope count
        twice.
        """
        return self.unexplained_error * (log2(setup.ranks) + self.scope.doublings(setup))

    def with_known(self, latency_us: float | None, spread: float | None) -> Basis:
        """Return this basis with the latency and the spread that are known of the cluster and of the job."""
        fitted = self.fitted
        if latency_us is not None:
            fitted = fitted.with_known("latency_s", latency_us * 1e-6, 0.1)
        if spread is not None:
            fitted = fitted.with_known("spread", spread, 0.25)
        return replace(self, fitted=fitted)


def published_basis(engine: str) -> Basis:
    """Fit an engine's costs on GPUs to the published tables."""
    points = published_points(engine)
    scope = Scope.from_points(engine, points, "the published tables", PUBLISHED_REACH)
    return Basis(
        engine, fit(points, GPU_PRIORS), scope, unexplained_error(_by_table(engine)) * new_cluster_factor()
    )


def measured_basis(engine: str, measured: Measured) -> Basis | None:
    """Fit an engine's costs to measured points; None if none of them has several hosts."""
    points = measured.points_of(engine)
    if not any(point.setup.hosts > 1 for point in points):
        return None
    priors = CPU_PRIORS if measured.device == "cpu" else GPU_PRIORS
    trials = [guess_groups(points, priors), *guess_extremes(points, priors).values()]
    scope = Scope.from_points(engine, points, "the measured points", measured_reach(points))
    return Basis(engine, fit(points, priors), scope, max(map(unexplained_error, trials)))


@cache
def new_cluster_factor() -> float:
    """Return how many times larger errors are on a cluster without points than on a new table of a known cluster;
    at least 1.

    Only Horovod has figures of two clusters; DDP's errors are assumed to grow as much.
    """
    source = {series.name: series.source for series in published_series()}
    guesses = guess_groups(published_points("horovod"), GPU_PRIORS, lambda point: source[point.series])
    return max(1.0, unexplained_error(guesses) / unexplained_error(_by_table("horovod")))


@cache
def _by_table(engine: str) -> Sequence[Guess]:
    """Guess each published table from all others."""
    return guess_groups(published_points(engine), GPU_PRIORS)


def double_hosts(job: Job, engine: str, asked: Setup) -> Iterator[Setup]:
    """Yield the set-up on 1, 2, 4, ... hosts and on as many as were requested."""
    hosts = 1
    while hosts < asked.hosts:
        yield replace(asked, hosts=hosts, compute_s=job.pass_s[engine] * asked.passes)
        hosts *= 2
    yield replace(asked, compute_s=job.pass_s[engine] * asked.passes)


def build_setup(
    job: Job, *, hosts: int, ranks_per_host: int, link_gbit: float | None, compression: str, passes: int
) -> Setup:
    """Build the set-up that was requested."""
    return Setup(
        hosts,
        ranks_per_host,
        inf if link_gbit is None else link_gbit,
        max(job.pass_s.values()) * passes,
        job.gradient_mb * 2**20 * SENT_FRACTION[compression],
        count_pieces(job.gradient_mb),
        passes,
        trees=job.device == "gpu",
    )


def project_rows(job: Job, basis: Basis, asked: Setup) -> list[Row]:
    """Return a row for each number of hosts."""
    found = []
    for setup in double_hosts(job, basis.engine, asked):
        low, high = interval(setup, basis.fitted, basis.uncertainty(setup)) if setup.ranks > 1 else (1.0, 1.0)
        by_formula = predict_step(setup, basis.fitted.costs)
        beside = published_near(basis.engine, setup) if job.device == "gpu" else []
        found.append(Row(basis.engine, setup, by_formula, low, high, basis.scope.reasons(setup), beside))
    return found


def published_near(engine: str, setup: Setup) -> list[str]:
    """Return published efficiencies on as many GPUs, of jobs that exchange about as much for their computing."""
    found = []
    for series in published_series():
        for point in series.points:
            there = point.setup
            much = [its.sent_bytes / (its.compute_s / its.passes) for its in (there, setup)]
            if (engine, there.ranks) == (series.engine, setup.ranks) and max(much) <= MAX_NEAR_RATIO * min(much):
                differs = there.hosts > 1 and there.link_gbit != setup.link_gbit
                link = f" at {there.link_gbit:g} Gbit/s" if differs else ""
                name = series.code if series.network == "ResNet-50" else series.name
                found.append(f"{point.efficiency:.0%} {name}{link}")
    return found
