"""The evidence that the runs of a job have given, and a cause of lost time that is found by it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import mean
from typing import Any

import numpy as np

from hvd_trainer.measure.stats import ERROR, pool, t_quantile
from hvd_trainer.tools.diagnose.machine_use import MachineUse
from hvd_trainer.tools.diagnose.profile import Blame, RankProfile, Seconds
from hvd_trainer.tools.diagnose.roles import WAITING

NORMAL, NO_EXCHANGE = "normal", "without exchange"
ALONE, TWICE = "one rank alone", "alone, twice the batch"
SIGMAS = 2.0
"""Standard errors on either side of a figure that its interval has: 95 %."""
BYTES = {"none": 4, "fp16": 2, "bf16": 2, "powersgd": 4}
"""Bytes of a gradient's element on the wire; of PowerSGD, which sends far fewer, an upper bound."""
DEFAULT_BUCKET_MB = 25

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
        per_byte, latency = np.polyfit(sizes, seconds, 1, w=1 / seconds)
        return cls(max(float(latency), 0.0), 1 / max(float(per_byte), 1e-15))

    def parts(self, num_bytes: float, exchanges: int) -> tuple[float, float]:
        """Return the seconds that latency and bandwidth take of `exchanges` exchanges of `num_bytes` together."""
        return exchanges * self.latency_s, num_bytes / self.bytes_per_s


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """All that is known of a job."""

    profiles: Sequence[RankProfile]
    """of the normal runs, in rank order; at least one"""
    machine: MachineUse = field(default_factory=MachineUse)
    cores: int = 1
    """that the job may use"""
    machine_cores: int = 1
    """of this machine"""
    is_trainer_job: bool = False
    """whether the job takes the Trainer's options, also where it ended before `facts` were known"""
    facts: Figures = field(default_factory=dict)
    """run.json of a Trainer job; of a script what is known of its work"""
    runs: Mapping[str, Sequence[Figures]] = field(default_factory=dict)
    """figures of the runs by their names, in rounds"""
    line: Line | None = None
    """of the exchanges on this machine"""

    @property
    def ranks(self) -> int:
        return len(self.profiles)

    @cached_property
    def tables(self) -> list[dict[str, Seconds]]:
        """The seconds of a typical step by role, of each rank."""
        return [profile.roles() for profile in self.profiles]

    @cached_property
    def busy(self) -> list[float]:
        """The seconds of a typical step in which each rank does not wait for the others."""
        return [sum(cost.own for role, cost in table.items() if role not in WAITING) for table in self.tables]

    @cached_property
    def carried(self) -> list[float]:
        """The seconds of a step in which each rank's exchange waits for threads in the queue for a CPU."""
        # In what a rank waits beyond this, it waits for a slower one, whatever its threads do meanwhile.
        exchange_s = min(sum(table[role].own for role in WAITING) for table in self.tables)
        queued = [
            profile.queued_s / profile.steps - sum(cost.queued for cost in table.values()) - profile.slow_queued_s
            for table, profile in zip(self.tables, self.profiles, strict=True)
        ]
        return [min(exchange_s, max(0.0, seconds)) for seconds in queued]

    @cached_property
    def step_s(self) -> float:
        """Mean seconds of a step of the normal run."""
        return mean(profile.step_s for profile in self.profiles)

    def mean_s(self, trial: str) -> float:
        """Return the mean seconds of a step of a trial that was run: of the normal one as its stacks tell them."""
        return self.step_s if trial == NORMAL else mean(figures["mean_s"] for figures in self.runs[trial])

    @property
    def threads(self) -> int:
        """Threads of a rank's operations on tensors; 0 if unknown."""
        return max(profile.switches.threads for profile in self.profiles) or int(self.facts.get("threads", 0))

    @property
    def run_cores(self) -> float:
        """Cores that the job keeps busy."""
        return sum(profile.cores for profile in self.profiles)

    @property
    def pinned(self) -> set[int]:
        """The cores that the ranks may use, if these are fewer than the ranks and the machine has others."""
        allowed = {core for profile in self.profiles for record in profile.records for core in record.cores}
        return allowed if len(allowed) < min(self.ranks, self.machine_cores) else set()

    @property
    def free_cores(self) -> float:
        """Cores that nothing keeps busy."""
        return max(0.0, self.cores - self.run_cores - self.machine.other_cores)

    @property
    def exchanged_bytes(self) -> float:
        """Bytes of all gradients; 0 if unknown."""
        return float(self.facts.get("parameters", 0) * BYTES[self.facts.get("compression", "none")])

    @property
    def bucket_mb(self) -> float:
        return float(self.facts.get("bucket_mb", DEFAULT_BUCKET_MB))

    def figure(self, trial: str, *names: str) -> tuple[float, float] | None:
        """Return a figure's mean over the runs of a trial, and its error; None if it was not run.

        The error is such that `SIGMAS` of it are Student's interval, by the spread between runs of the same kind,
        of all kinds together; without a kind that was run twice it is infinite.

        Args:
            names: of the figure, from the outermost dictionary on; `step_s` by default.
        """
        values = self._values(trial, names)
        if not values:
            return None
        kinds = [self._values(label, names) for label in self.runs]
        spread, freedom = pool([[value / (mean(each) or 1.0) for value in each] for each in kinds])
        if not freedom:
            return mean(values), math.inf
        half = t_quantile(1 - ERROR / 2, freedom) * spread * mean(values) / math.sqrt(len(values))
        return mean(values), half / SIGMAS

    def _values(self, trial: str, names: Sequence[str]) -> list[float]:
        values = []
        for figures in self.runs.get(trial, ()):
            value: Any = figures
            for name in names or ("step_s",):
                value = value.get(name, {})
            if value != {}:
                values.append(float(value))
        return values


@dataclass(frozen=True)
class Cause:
    """A cause of lost time."""

    kind: str
    """a key of `CAUSES`"""
    seconds: float
    """of a step"""
    error: float
    """standard error of `seconds`"""
    evidence: str
    """what shows it"""
    line: Blame | None = None
    """the line to blame"""
    rank: int | None = None
    """the rank that is to blame; None: all"""
    details: Figures = field(default_factory=dict)

    @property
    def is_clear(self) -> bool:
        """Whether it is more than the noise."""
        return self.seconds > SIGMAS * self.error


def ms(seconds: float) -> str:
    """Return milliseconds as text."""
    return f"{1000 * seconds:.1f}"


def argmax(values: Sequence[float]) -> int:
    """Return the place of the largest value."""
    return max(range(len(values)), key=values.__getitem__)
