"""What the points of an engine cover, and what therefore nobody can know from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isinf, log2

from hvd_trainer.tools.estimate.model import Setup
from hvd_trainer.tools.estimate.points import Point
from hvd_trainer.tools.runner.formats import number, percent

PUBLISHED_REACH = 4.0
"""How many times beyond its points the formula may be used: the held-out tests go from 8 GPUs to 32, and from
100 Gbit/s to 25."""


@dataclass(frozen=True)
class Scope:
    """The region in which an engine has points."""

    engine: str
    source: str
    """whose points they are, for sentences"""
    ranks: int
    """the most"""
    slowest_gbit: float
    fastest_gbit: float
    wire_share: float
    """the largest part of computing for which gradients are on the link"""
    reach: float
    """how many times beyond is still answered"""

    @classmethod
    def of(cls, engine: str, points: Sequence[Point], source: str, reach: float) -> Scope:
        """From an engine's points, one of which at least has several hosts."""
        setups = [point.setup for point in points if point.setup.hosts > 1]
        links = [setup.link_gbit for setup in setups]
        ranks, shares = max(setup.ranks for setup in setups), max(setup.wire_share for setup in setups)
        return cls(engine, source, ranks, min(links), max(links), shares, reach)

    def doublings(self, setup: Setup) -> float:
        """How often what was measured must be doubled to get there, in ranks and in the link's speed."""
        beyond = [setup.ranks / self.ranks]
        if setup.hosts > 1:
            beyond += [self.slowest_gbit / setup.link_gbit, _ratio(setup.link_gbit, self.fastest_gbit)]
        return sum(log2(each) for each in beyond if each > 1)

    def reasons(self, setup: Setup) -> list[str]:
        """Why the efficiency of a set-up cannot be known; nothing if it can."""
        if setup.ranks == 1:
            return []
        found = []
        # Its first rank hears from every other what is ready: that grows with ranks, and is in no formula here.
        reach = 1.0 if self.engine == "horovod" else self.reach
        if setup.ranks > reach * self.ranks:
            grows = "how Horovod's ranks agree on what to send grows with them" if reach == 1 else _further(self)
            found.append(
                f"{setup.ranks} ranks are {number(setup.ranks / self.ranks)} times the {self.ranks} where "
                f"{self.source} for {self.engine} end, and {grows}"
            )
        if setup.hosts > 1:
            found += self._of_the_link(setup)
        return found

    def _of_the_link(self, setup: Setup) -> list[str]:
        found = []
        slower, faster = self.slowest_gbit / setup.link_gbit, _ratio(setup.link_gbit, self.fastest_gbit)
        if max(slower, faster) > self.reach:
            times, word, edge = (
                (slower, "slower", self.slowest_gbit) if slower > faster else (faster, "faster", self.fastest_gbit)
            )
            found.append(
                f"a link of {setup.link_gbit:g} Gbit/s is {number(times)} times {word} than the {edge:g} of "
                f"{self.source} for {self.engine}, and {_further(self)}"
            )
        if setup.wire_share > self.reach * self.wire_share:
            found.append(
                f"gradients are on this link for {percent(setup.wire_share)} of the time that computing takes, "
                f"{number(setup.wire_share / self.wire_share)} times the {percent(self.wire_share)} of "
                f"{self.source} for {self.engine}, and {_further(self)}"
            )
        return found


def measured_reach(points: Sequence[Point]) -> float:
    """As far as leaving out the most ranks tests it: to so many times the fewest."""
    ranks = [point.setup.ranks for point in points]
    return max(ranks) / min(ranks)


def _further(scope: Scope) -> str:
    return f"nothing here tests the formula more than {scope.reach:g} times beyond what was measured"


def _ratio(speed: float, fastest: float) -> float:
    return 1.0 if isinf(fastest) else inf if isinf(speed) else speed / fastest
