"""Compute the shares of a step's time from runs in which parts of the job were left out.

With T(...) the time of a step, the mean of ranks and of the middle half of the steps:

    data         T(normal) - T(without data)
    exchange     T(normal) - T(without exchange) - waiting for the slowest rank
    straggler    waiting for the slowest rank, and what that rank computes longer than the quickest
    contention   T(computing, quickest of N ranks) - T(computing, one rank alone), or what one thread each gains
    overhead     2 T(alone) - T(alone, twice the batch): what a step costs however small its batch is
    computing    the rest of T(alone): what the samples cost

Pure functions: nothing is started here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

NORMAL, NO_DATA, NO_EXCHANGE, NEITHER = "normal", "without data", "without exchange", "without both"
ALONE, TWICE, ONE_THREAD = "one rank alone", "alone, twice the batch", "one thread per rank"
CAUSES = {
    "data": "fetching data",
    "exchange": "exchanging gradients",
    "straggler": "waiting for the slowest rank",
    "contention": "ranks in each other's way on this machine's CPUs",
    "overhead": "overhead per step, however small the batch is",
}
"""The causes of lost time, in words."""
COMPUTING = "computing the samples"
MAX_CONTRADICTION = 0.15
"""Fraction of a step by which the runs may contradict each other; more means that something else was at work."""
MIN_SHARE = 0.05
"""Fraction of a step below which a cause is not worth an action."""

Figures = Mapping[str, Any]


@dataclass(frozen=True)
class Line:
    """The model of an exchange's time: latency + bytes / bandwidth."""

    latency_s: float
    bytes_per_s: float

    @classmethod
    def through(cls, pairs: Sequence[Sequence[float]]) -> Line:
        """Return the line with the smallest relative errors, so that small exchanges count as much as large ones.

        Args:
            pairs: bytes and seconds, of two sizes at least.
        """
        sizes, seconds = np.array(pairs, dtype=float).T
        weighted = np.stack([1 / seconds, sizes / seconds], axis=1)
        (latency, per_byte), *_ = np.linalg.lstsq(weighted, np.ones(len(sizes)), rcond=None)
        return cls(max(float(latency), 0.0), 1 / max(float(per_byte), 1e-15))

    def parts(self, num_bytes: float, exchanges: int) -> tuple[float, float]:
        """Return the seconds that latency and bandwidth take of `exchanges` exchanges of `num_bytes` together."""
        return exchanges * self.latency_s, num_bytes / self.bytes_per_s


@dataclass(frozen=True)
class Shares:
    """The parts of a step's time, in seconds; `step_s` is their sum plus `unexplained_s`."""

    step_s: float
    alone_s: float
    """a step of one rank alone"""
    seconds: Mapping[str, float]
    """by cause"""
    computing_s: float
    slowest_rank: int
    latency_s: float
    """of the exchange"""
    bandwidth_s: float
    twice_gains_s: float = 0.0
    """seconds by which a rank alone was faster with twice the batch, which only a disturbance can explain"""

    @property
    def unexplained_s(self) -> float:
        """The rest of a step, or, if negative, time that is counted twice: an overlap, or noise."""
        return self.step_s - self.computing_s - sum(self.seconds.values())

    @property
    def contradiction(self) -> float:
        """The fraction of a step by which the runs contradict each other."""
        return max(abs(self.unexplained_s), self.twice_gains_s) / self.step_s

    @property
    def is_doubtful(self) -> bool:
        return self.contradiction > MAX_CONTRADICTION

    @property
    def efficiency(self) -> float:
        """The speed of a rank, as a fraction of that of a rank alone."""
        return self.alone_s / self.step_s

    def share(self, cause: str) -> float:
        """Return the fraction of a step that a cause takes."""
        return self.seconds[cause] / self.step_s

    @property
    def ranked(self) -> list[str]:
        """The causes that are worth an action, the largest first."""
        worth = [cause for cause in self.seconds if self.share(cause) >= MIN_SHARE]
        return sorted(worth, key=self.share, reverse=True)


def compute_shares(runs: Mapping[str, Figures], line: Line, gradient_bytes: float, exchanges: int) -> Shares:
    """Return the shares of a step's time from the figures of each run (`step_stats.speed`), by its name.

    Args:
        runs: all; `ONE_THREAD` where ranks have several.
        line: of the exchanges on this machine.
        gradient_bytes: that a rank sends in a step.
        exchanges: in how many pieces.
    """
    normal, neither, alone, twice = (runs[name] for name in (NORMAL, NEITHER, ALONE, TWICE))
    step_s, straggler = normal["step_s"], normal["parts"]["straggler"]
    computing, slowest = neither["computing_s"], normal["computing_s"]
    compute_s, twice_s = (its["step_s"] - its["parts"]["data"] for its in (alone, twice))
    overhead = min(max(2 * compute_s - twice_s, 0.0), compute_s)
    exchange = max(step_s - runs[NO_EXCHANGE]["step_s"] - straggler, 0.0)
    latency, bandwidth = line.parts(gradient_bytes, exchanges)
    seconds = {
        "data": max(step_s - runs[NO_DATA]["step_s"], 0.0),
        "exchange": exchange,
        "straggler": straggler + float(np.mean(computing)) - min(computing),
        "contention": max(min(computing) - compute_s, 0.0),
        "overhead": overhead,
    }
    if ONE_THREAD in runs:
        _charge_threads(seconds, step_s - runs[ONE_THREAD]["step_s"])
    part = seconds["exchange"] / (latency + bandwidth)
    return Shares(
        step_s,
        alone["step_s"],
        seconds,
        compute_s - overhead,
        int(np.argmax(slowest)),
        latency * part,
        bandwidth * part,
        max(compute_s - twice_s, 0.0),
    )


def _charge_threads(seconds: dict[str, float], gained: float) -> None:
    """Move to contention the time that one thread per rank gains, also where it looks like waiting.

    Args:
        seconds: by cause; changed.
        gained: seconds by which a step is shorter with one thread.
    """
    for cause in ("exchange", "straggler"):
        moved = min(max(gained - seconds["contention"], 0.0), seconds[cause])
        seconds[cause] -= moved
        seconds["contention"] += moved
