"""From a job and costs to efficiencies on 1, 2, 4, ... hosts, each with an interval or why there is none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import inf, log2

from hvd_trainer.tools.estimate.fit import CPU, GPU, Fit, fit, interval
from hvd_trainer.tools.estimate.held_out import Guess, by_series, furthest, guesses_of, unexplained
from hvd_trainer.tools.estimate.model import Setup, Step, step
from hvd_trainer.tools.estimate.points import SENT, Measured, pieces_of
from hvd_trainer.tools.estimate.published import RESNET_50, SERIES, published
from hvd_trainer.tools.estimate.scope import PUBLISHED_REACH, Scope, measured_reach
from hvd_trainer.tools.estimate.workload import Job

NEAR = 2.0
"""A published figure stands beside a projection whose gradients are as large for its computing, within this."""
LOSSES = {
    "fixed_s": "what the engine costs per step",
    "latency_s": "the latency of messages",
    "bandwidth_s": "the bandwidth",
    "straggler_s": "the slowest rank",
}


@dataclass(frozen=True)
class Row:
    """One engine on one number of hosts."""

    engine: str
    setup: Setup
    step: Step
    """by the formula, whether or not that can be believed"""
    low: float
    high: float
    reasons: Sequence[str]
    """why it cannot be known; empty if it can"""
    published: Sequence[str]
    """figures of such set-ups"""

    @property
    def is_known(self) -> bool:
        return not self.reasons

    @property
    def limited_by(self) -> str | None:
        """What takes most of what is lost, and its part of a step."""
        lost = {name: getattr(self.step, name) for name in LOSSES}
        name = max(lost, key=lost.__getitem__)
        return f"{LOSSES[name]}, {lost[name] / self.step.total_s:.1%}" if lost[name] > 0 else None


@dataclass(frozen=True)
class Basis:
    """What an engine's projection follows from."""

    engine: str
    fitted: Fit
    scope: Scope
    unexplained: float
    """by how much a step is off for each doubling of ranks, where the model has seen nothing"""

    def doubt(self, setup: Setup) -> float:
        """By how much its step is off; doublings that nobody has measured count twice."""
        return self.unexplained * (log2(setup.ranks) + self.scope.doublings(setup))

    def knowing(self, latency_us: float | None, spread: float | None) -> Basis:
        """The same with what is known of the cluster and of the job."""
        fitted = self.fitted
        if latency_us is not None:
            fitted = fitted.knowing("latency_s", latency_us * 1e-6, 0.1)
        if spread is not None:
            fitted = fitted.knowing("spread", spread, 0.25)
        return replace(self, fitted=fitted)


def published_basis(engine: str) -> Basis:
    """Costs of GPUs, from the published tables."""
    points = published(engine)
    scope = Scope.of(engine, points, "the published tables", PUBLISHED_REACH)
    return Basis(engine, fit(points, GPU), scope, unexplained(_by_table(engine)) * elsewhere())


def measured_basis(engine: str, measured: Measured) -> Basis | None:
    """Costs of what was measured; None if the engine was not, or on one host only."""
    points = measured.of(engine)
    if not any(point.setup.hosts > 1 for point in points):
        return None
    priors = CPU if measured.device == "cpu" else GPU
    trials = [by_series(points, priors), *furthest(points, priors).values()]
    scope = Scope.of(engine, points, "the measured points", measured_reach(points))
    return Basis(engine, fit(points, priors), scope, max(map(unexplained, trials)))


@cache
def elsewhere() -> float:
    """How many times as large errors are on a cluster that the model has not seen as about a table of a known one.

    Horovod alone has figures of two clusters; DDP's errors are taken to grow as much.
    """
    points = published("horovod")
    source = {series.name: series.source for series in SERIES}
    guesses = []
    for place in dict.fromkeys(source[point.series] for point in points):
        seen = [point for point in points if source[point.series] != place]
        guesses += guesses_of([point for point in points if source[point.series] == place], seen, GPU)
    return max(1.0, unexplained(guesses) / unexplained(_by_table("horovod")))


@cache
def _by_table(engine: str) -> Sequence[Guess]:
    """Each published table from all others."""
    return by_series(published(engine), GPU)


def setups(job: Job, engine: str, asked: Setup) -> Iterator[Setup]:
    """The same on 1, 2, 4, ... hosts and on as many as were asked for."""
    hosts = 1
    while hosts < asked.hosts:
        yield replace(asked, hosts=hosts, compute_s=job.pass_s[engine] * asked.passes)
        hosts *= 2
    yield replace(asked, compute_s=job.pass_s[engine] * asked.passes)


def setup_of(
    job: Job, *, hosts: int, ranks_per_host: int, link_gbit: float | None, compression: str, passes: int
) -> Setup:
    """What was asked for."""
    return Setup(
        hosts,
        ranks_per_host,
        inf if link_gbit is None else link_gbit,
        max(job.pass_s.values()) * passes,
        job.gradient_mb * 2**20 * SENT[compression],
        pieces_of(job.gradient_mb),
        passes,
        trees=job.device == "gpu",
    )


def rows(job: Job, basis: Basis, asked: Setup, more_reasons: Sequence[str] = ()) -> list[Row]:
    """One for each number of hosts.

    Args:
        more_reasons: why nothing of it can be known, whatever the points cover.
    """
    found = []
    for setup in setups(job, basis.engine, asked):
        low, high = interval(setup, basis.fitted, basis.doubt(setup)) if setup.ranks > 1 else (1.0, 1.0)
        by_formula = step(setup, basis.fitted.costs)
        reasons = [*more_reasons, *basis.scope.reasons(setup)]
        beside = near(basis.engine, setup) if job.device == "gpu" else []
        found.append(Row(basis.engine, setup, by_formula, low, high, reasons, beside))
    return found


def near(engine: str, setup: Setup) -> list[str]:
    """Published efficiencies on as many GPUs, of jobs that exchange about as much."""
    found = []
    for series in SERIES:
        for point in series.points:
            there = point.setup
            much = [its.sent_bytes / (its.compute_s / its.passes) for its in (there, setup)]
            if (engine, there.ranks) == (series.engine, setup.ranks) and max(much) <= NEAR * min(much):
                differs = there.hosts > 1 and there.link_gbit != setup.link_gbit
                link = f" at {there.link_gbit:g} Gbit/s" if differs else ""
                found.append(
                    f"{point.efficiency:.0%} {series.code if series.network is RESNET_50 else series.name}{link}"
                )
    return found
