"""What a step costs on many ranks: a formula, and nothing else.

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

BACKWARD = 2 / 3
"""Of computing: backward makes two products of matrices for each one of forward."""
INNER = 0.35
"""A message inside a host, as a part of one between hosts: NCCL's own model has 3.4 and 9.6 us."""
TREE_BANDWIDTH = 0.9
"""Of a ring's, in NCCL's own model."""


@dataclass(frozen=True)
class Setup:
    """What is trained, and on what."""

    hosts: int
    ranks_per_host: int
    link_gbit: float
    """of each host, each way; infinite: nothing but the hosts' own work limits it"""
    compute_s: float
    """a whole step of one rank that has nobody to wait for"""
    sent_bytes: float
    """of gradients, as they travel"""
    pieces: int
    """in which they travel"""
    passes: int = 1
    """that a step accumulates"""
    delay_s: float = 0.0
    """that the cable between two hosts adds, one way"""
    trees: bool = False
    """whether the library knows trees"""

    @property
    def ranks(self) -> int:
        return self.hosts * self.ranks_per_host

    @property
    def wire_share(self) -> float:
        """How long the bytes are on the link at its full speed, as a part of computing."""
        return 2 * (self.ranks - 1) / self.ranks * self.sent_bytes * _wire_s(self) / self.compute_s


class Costs(NamedTuple):
    """What an engine costs on some machine: what is fitted. Nothing is negative."""

    fixed_s: float
    """per step, as soon as there are two ranks"""
    latency_s: float
    """alpha: of a message between hosts"""
    link_factor: float
    """how many times as long as its bits need on the link a message takes; 1 at best"""
    byte_s: float
    """of a byte, however fast the link: copying, adding up"""
    overlap: float
    """the part that is hidden of what could be"""
    rounds: float
    """exchanges per step that carry no gradients, such as ranks that tell each other what is ready"""
    spread: float
    """standard deviation of a rank's compute time, as a part of it"""


class Step(NamedTuple):
    """Where the time of a step goes, in seconds."""

    compute_s: float
    fixed_s: float
    latency_s: float
    """of the exchange, what is not hidden"""
    bandwidth_s: float
    straggler_s: float

    @property
    def total_s(self) -> float:
        return sum(self)

    @property
    def efficiency(self) -> float:
        """The speed of a rank, as a part of that of a rank alone."""
        return self.compute_s / self.total_s


def step(setup: Setup, costs: Costs) -> Step:
    """The parts of a step."""
    if setup.ranks == 1:
        return Step(setup.compute_s, 0.0, 0.0, 0.0, 0.0)
    latency, bandwidth = exchange(setup, costs)
    whole = latency + bandwidth
    could = costs.overlap * (1 - 1 / setup.pieces) * whole
    hidden = min(could, BACKWARD * setup.compute_s / setup.passes)
    exposed = 1 - hidden / whole if whole > 0 else 0.0
    straggler = costs.spread * setup.compute_s * largest_of(setup.ranks)
    return Step(setup.compute_s, costs.fixed_s, exposed * latency, exposed * bandwidth, straggler)


def exchange(setup: Setup, costs: Costs) -> tuple[float, float]:
    """The seconds that messages and bytes take in a step, by the faster of the algorithms there are."""
    ranks, hosts = setup.ranks, setup.hosts
    over_link, inner = costs.latency_s + setup.delay_s, INNER * costs.latency_s
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
        2 * setup.sent_bytes * byte_s / TREE_BANDWIDTH,
    )
    return min(ring, tree, key=sum)


def largest_of(number: int) -> float:
    """The expected maximum of so many standard normal variables (Blom 1958)."""
    return NormalDist().inv_cdf((number - 0.375) / (number + 0.25))


def _wire_s(setup: Setup) -> float:
    """Of a byte on the link."""
    return 8e-9 / setup.link_gbit if setup.hosts > 1 else 0.0
