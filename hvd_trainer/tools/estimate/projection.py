"""Project a job and an engine's costs to efficiencies on 1, 2, 4, ... hosts, with intervals, or say why not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import inf, isinf, log2

from hvd_trainer.measure.formats import number, percent
from hvd_trainer.tools.estimate.fit import Fit, fit, interval
from hvd_trainer.tools.estimate.held_out import (
    Guess,
    guess_extremes,
    guess_groups,
    unexplained_error,
)
from hvd_trainer.tools.estimate.job import Job
from hvd_trainer.tools.estimate.model import Setup, Step, predict_step
from hvd_trainer.tools.estimate.points import Measured, Point, published_points, published_series

PUBLISHED_REACH = 4.0
"""The factor by which a set-up may exceed the published points: the held-out tests go from 8 GPUs to 32, and from
100 Gbit/s to 25."""
MAX_NEAR_RATIO = 2.0
"""A published figure is shown beside a projection if their gradients per second of computing differ by less."""
LOSS_NAMES = {
    "fixed_s": "what the engine costs per step",
    "latency_s": "the latency of messages",
    "bandwidth_s": "the bandwidth",
    "straggler_s": "the slowest rank",
}


@dataclass(frozen=True)
class Scope:
    """The region in which an engine has points."""

    engine: str
    source: str
    """origin of the points, for sentences"""
    ranks: int
    """largest number of ranks"""
    slowest_gbit: float
    fastest_gbit: float
    wire_fraction: float
    """largest `Setup.wire_fraction`"""
    reach: float
    """factor by which a set-up may exceed the points"""

    @classmethod
    def from_points(cls, engine: str, points: Sequence[Point], source: str, reach: float) -> Scope:
        """Build the scope of an engine's points, at least one of which has several hosts."""
        set_ups = [point.setup for point in points if point.setup.hosts > 1]
        links = [setup.link_gbit for setup in set_ups]
        ranks, shares = max(setup.ranks for setup in set_ups), max(setup.wire_fraction for setup in set_ups)
        return cls(engine, source, ranks, min(links), max(links), shares, reach)

    def link_ratios(self, setup: Setup) -> tuple[float, float]:
        """Return how many times a set-up's link is slower than the slowest, and faster than the fastest."""
        gbit = setup.link_gbit
        faster = 1.0 if isinf(self.fastest_gbit) else inf if isinf(gbit) else gbit / self.fastest_gbit
        return self.slowest_gbit / gbit, faster

    def doublings(self, setup: Setup) -> float:
        """Return how often the scope must be doubled to reach a set-up, in ranks and in the link's speed."""
        beyond = [setup.ranks / self.ranks, *(self.link_ratios(setup) if setup.hosts > 1 else ())]
        return sum(log2(each) for each in beyond if each > 1)

    def reasons(self, setup: Setup) -> list[str]:
        """Return the reasons why the efficiency of a set-up cannot be known; empty if it can."""
        if setup.ranks == 1:
            return []
        untested = f"nothing here tests the formula more than {self.reach:g} times beyond what was measured"
        # Horovod's rank 0 collects from all ranks which tensors are ready: a cost that grows with the ranks and is
        # not in the formula.
        is_horovod = self.engine == "horovod"
        found, source = [], f"{self.source} for {self.engine}"
        if setup.ranks > (1.0 if is_horovod else self.reach) * self.ranks:
            why = "how Horovod's ranks agree on what to send grows with them" if is_horovod else untested
            times = number(setup.ranks / self.ranks)
            found.append(f"{setup.ranks} ranks are {times} times the {self.ranks} where {source} end, and {why}")
        if setup.hosts == 1:
            return found
        slower, faster = self.link_ratios(setup)
        if max(slower, faster) > self.reach:
            edge = f"slower than the {self.slowest_gbit:g}"
            if faster > slower:
                edge = f"faster than the {self.fastest_gbit:g}"
            times = number(max(slower, faster))
            found.append(
                f"a link of {setup.link_gbit:g} Gbit/s is {times} times {edge} of {source}, and {untested}"
            )
        if setup.wire_fraction > self.reach * self.wire_fraction:
            found.append(
                f"gradients are on this link for {percent(setup.wire_fraction)} of the time that computing takes, "
                f"{number(setup.wire_fraction / self.wire_fraction)} times the {percent(self.wire_fraction)} of "
                f"{source}, and {untested}"
            )
        return found


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
        lost, name = max((getattr(self.step, name), name) for name in LOSS_NAMES)
        return f"{LOSS_NAMES[name]}, {lost / self.step.total_s:.1%}" if lost > 0 else None


@dataclass(frozen=True)
class Basis:
    """The fit and the scope from which an engine's projection follows."""

    engine: str
    fitted: Fit
    scope: Scope
    unexplained_error: float
    """standard deviation of the logarithm of a step's error, per doubling of ranks"""

    def uncertainty(self, setup: Setup) -> float:
        """Return the standard deviation of a step time's logarithm; doublings beyond the scope count twice."""
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
    error = unexplained_error(_by_table(engine)) * new_cluster_factor()
    return Basis(engine, fit(points, "gpu"), scope, error)


def measured_basis(engine: str, measured: Measured) -> Basis | None:
    """Fit an engine's costs to measured points; None if none of them has several hosts."""
    points, device = measured.points_of(engine), measured.device
    if not any(point.setup.hosts > 1 for point in points):
        return None
    trials = [guess_groups(points, device), *guess_extremes(points, device).values()]
    # Leaving out the points with the most ranks tests the formula so far.
    ranks = [point.setup.ranks for point in points]
    scope = Scope.from_points(engine, points, "the measured points", max(ranks) / min(ranks))
    return Basis(engine, fit(points, device), scope, max(map(unexplained_error, trials)))


@cache
def new_cluster_factor() -> float:
    """Return how many times larger errors are on a cluster without points than on a new table of a known cluster;
    at least 1.

    Only Horovod has figures of two clusters; DDP's errors are assumed to grow as much.
    """
    source = {series.name: series.source for series in published_series()}
    guesses = guess_groups(published_points("horovod"), "gpu", lambda point: source[point.series])
    return max(1.0, unexplained_error(guesses) / unexplained_error(_by_table("horovod")))


@cache
def _by_table(engine: str) -> Sequence[Guess]:
    """Guess each published table from all others."""
    return guess_groups(published_points(engine), "gpu")


def project_rows(job: Job, basis: Basis, asked: Setup) -> Iterator[Row]:
    """Yield a row for 1, 2, 4, ... hosts and for as many as were requested."""
    for hosts in [*(2**n for n in range((asked.hosts - 1).bit_length())), asked.hosts]:
        setup = replace(asked, hosts=hosts, compute_s=job.pass_s[basis.engine] * asked.passes)
        low, high = interval(setup, basis.fitted, basis.uncertainty(setup)) if setup.ranks > 1 else (1.0, 1.0)
        by_formula = predict_step(setup, basis.fitted.costs)
        beside = published_near(basis.engine, setup) if job.device == "gpu" else []
        yield Row(basis.engine, setup, by_formula, low, high, basis.scope.reasons(setup), beside)


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
