"""Predict the time of a step on many ranks by a formula.

    step = compute + fixed + (exchange - hidden) + straggler

    rank 0   | forward | backward                   |        |       |
    exchange                 | hidden ............. | exposed|
    slowest  | forward | backward                            | straggler

Exchange. Sending m bytes to a neighbour costs alpha + m * beta (Hockney 1994). A ring over n ranks adds up B bytes
in 2(n-1) such messages of B/n bytes each (Patarasuk and Yuan 2009), which no algorithm can do with fewer bytes:

    ring     2(n-1) alpha + 2 (n-1)/n B beta
    tree     2 log2(n) alpha + 2 B beta         fewer messages, more bytes (Thakur, Rabenseifner and Gropp 2005)

Ranks that share a host stand beside each other in the ring, so that of 2(n-1) messages one after the other
2(hosts-1) go over the link, and each link carries every byte once each way. NCCL's own cost model (its
graph/tuning.cc) counts messages the same way, and takes the tree where that is faster; Gloo has the ring only.

Hidden. Gradients travel in pieces while backward goes on; the last piece exists only when backward is over, so
that of T pieces at most (T-1)/T are hidden, and never more than backward takes. With accumulation it is the last
pass's backward alone.

Straggler. All ranks wait for the slowest. If a rank's compute time has the standard deviation s, the largest of n
is s * E(n) above the mean, where E is the expected maximum of n normal variables. E(n) tends to sqrt(2 ln n), 44 %
too much for n = 8 (2.04, not 1.42); Blom's approximation (1958) is within 1 % from there on.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2
from statistics import NormalDist
from typing import NamedTuple

BACKWARD_FRACTION = 2 / 3
"""Backward's part of computing: it makes two products of matrices for each one of forward."""
INNER_LATENCY_FRACTION = 0.35
"""The latency inside of a host, divided by that between hosts: NCCL's own model has 3.4 and 9.6 us."""
TREE_BANDWIDTH_FRACTION = 0.9
"""The bandwidth of a tree, divided by that of a ring, in NCCL's own model."""


@dataclass(frozen=True)
class Setup:
    """A job and the machines it runs on."""

    hosts: int
    ranks_per_host: int
    link_gbit: float
    """speed of each host's link, each way; infinite: the link is no limit"""
    compute_s: float
    """time of a whole step of a rank alone"""
    sent_bytes: float
    """size of the gradients as they are sent"""
    pieces: int
    """number of pieces in which the gradients are sent"""
    passes: int = 1
    """passes that a step accumulates"""
    delay_s: float = 0.0
    """latency that the cable between two hosts adds, one way"""
    trees: bool = False
    """whether the library has a tree algorithm"""

    @property
    def ranks(self) -> int:
        return self.hosts * self.ranks_per_host

    @property
    def wire_fraction(self) -> float:
        """The time that the gradients take on the link at its full speed, divided by the time of computing."""
        return 2 * (self.ranks - 1) / self.ranks * self.sent_bytes * _wire_s(self) / self.compute_s


class Costs(NamedTuple):
    """The costs of an engine on some machines, which are fitted; none is negative."""

    fixed_s: float
    """per step, as soon as there are two ranks"""
    latency_s: float
    """alpha: latency of a message between hosts"""
    link_factor: float
    """time of a message on the link, divided by the time of its bits; 1 at best"""
    byte_s: float
    """time of a byte apart from the link: copying, adding up"""
    overlap: float
    """hidden part of the exchange, divided by the part that could be hidden"""
    rounds: float
    """exchanges per step that carry no gradients, such as ranks that tell each other what is ready"""
    spread: float
    """standard deviation of a rank's compute time, divided by that time"""


class Step(NamedTuple):
    """The parts of a step's time, in seconds."""

    compute_s: float
    fixed_s: float
    latency_s: float
    """part of the exchange that is not hidden; so is `bandwidth_s`"""
    bandwidth_s: float
    straggler_s: float

    @property
    def total_s(self) -> float:
        return sum(self)

    @property
    def efficiency(self) -> float:
        """The speed of a rank, divided by that of a rank alone."""
        return self.compute_s / self.total_s


def predict_step(setup: Setup, costs: Costs) -> Step:
    """Return the parts of a step's time by the formula."""
    if setup.ranks == 1:
        return Step(setup.compute_s, 0.0, 0.0, 0.0, 0.0)
    latency, bandwidth = predict_exchange(setup, costs)
    whole = latency + bandwidth
    could = costs.overlap * (1 - 1 / setup.pieces) * whole
    hidden = min(could, BACKWARD_FRACTION * setup.compute_s / setup.passes)
    exposed = 1 - hidden / whole if whole > 0 else 0.0
    straggler = costs.spread * setup.compute_s * expected_maximum(setup.ranks)
    return Step(setup.compute_s, costs.fixed_s, exposed * latency, exposed * bandwidth, straggler)


def predict_exchange(setup: Setup, costs: Costs) -> tuple[float, float]:
    """Return the seconds of latency and of bandwidth in a step's exchange, by the faster of ring and tree."""
    ranks, hosts = setup.ranks, setup.hosts
    over_link, inner = costs.latency_s + setup.delay_s, INNER_LATENCY_FRACTION * costs.latency_s
    byte_s = costs.byte_s + costs.link_factor * _wire_s(setup)
    times = setup.pieces + costs.rounds
    ring = (
        times * 2 * ((hosts - 1) * over_link + (ranks - hosts) * inner),
        2 * (ranks - 1) / ranks * setup.sent_bytes * byte_s,
    )
    if not setup.trees or hosts == 1:
        return ring
    tree = (
        times * 2 * (ceil(log2(hosts)) * over_link + (setup.ranks_per_host - 1) * inner),
        2 * setup.sent_bytes * byte_s / TREE_BANDWIDTH_FRACTION,
    )
    return min(ring, tree, key=sum)


def expected_maximum(number: int) -> float:
    """Return the expected maximum of so many standard normal variables (Blom 1958)."""
    return NormalDist().inv_cdf((number - 0.375) / (number + 0.25))


def _wire_s(setup: Setup) -> float:
    """Return the seconds that a byte takes on the link; 0 on one host."""
    return 8e-9 / setup.link_gbit if setup.hosts > 1 else 0.0
