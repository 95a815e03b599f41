"""Determine what the points of an engine cover, and what cannot be known from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isinf, log2

from hvd_trainer.tools.estimate.model import Setup
from hvd_trainer.tools.estimate.points import Point
from hvd_trainer.tools.runner.formats import number, percent

PUBLISHED_REACH = 4.0
"""The factor by which a set-up may exceed the published points: the held-out tests go from 8 GPUs to 32, and from
100 Gbit/s to 25."""


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

    def doublings(self, setup: Setup) -> float:
        """Return how often the scope must be doubled to reach a set-up, in ranks and in the link's speed."""
        beyond = [setup.ranks / self.ranks]
        if setup.hosts > 1:
            beyond += [self.slowest_gbit / setup.link_gbit, _ratio(setup.link_gbit, self.fastest_gbit)]
        return sum(log2(each) for each in beyond if each > 1)

    def reasons(self, setup: Setup) -> list[str]:
        """Return the reasons why the efficiency of a set-up cannot be known; empty if it can."""
        if setup.ranks == 1:
            return []
        found = []
        # Horovod's rank 0 collects from all ranks which tensors are ready: a cost that grows with the ranks and is
        # not in the formula.
        reach = 1.0 if self.engine == "horovod" else self.reach
        if setup.ranks > reach * self.ranks:
            grows = (
                "how Horovod's ranks agree on what to send grows with them" if reach == 1 else _explain_reach(self)
            )
            found.append(
                f"{setup.ranks} ranks are {number(setup.ranks / self.ranks)} times the {self.ranks} where "
                f"{self.source} for {self.engine} end, and {grows}"
            )
        if setup.hosts > 1:
            found += self._link_reasons(setup)
        return found

    def _link_reasons(self, setup: Setup) -> list[str]:
        found = []
        slower, faster = self.slowest_gbit / setup.link_gbit, _ratio(setup.link_gbit, self.fastest_gbit)
        if max(slower, faster) > self.reach:
            times, word, edge = (
                (slower, "slower", self.slowest_gbit) if slower > faster else (faster, "faster", self.fastest_gbit)
            )
            found.append(
                f"a link of {setup.link_gbit:g} Gbit/s is {number(times)} times {word} than the {edge:g} of "
                f"{self.source} for {self.engine}, and {_explain_reach(self)}"
            )
        if setup.wire_fraction > self.reach * self.wire_fraction:
            found.append(
                f"gradients are on this link for {percent(setup.wire_fraction)} of the time that computing takes, "
                f"{number(setup.wire_fraction / self.wire_fraction)} times the {percent(self.wire_fraction)} of "
                f"{self.source} for {self.engine}, and {_explain_reach(self)}"
            )
        return found


def measured_reach(points: Sequence[Point]) -> float:
    """Return how far leaving out the points with the most ranks tests the formula: the most ranks by the
    fewest.
    """
    ranks = [point.setup.ranks for point in points]
    return max(ranks) / min(ranks)


def _explain_reach(scope: Scope) -> str:
    return f"nothing here tests the formula more than {scope.reach:g} times beyond what was measured"


def _ratio(speed: float, fastest: float) -> float:
    return 1.0 if isinf(fastest) else inf if isinf(speed) else speed / fastest
