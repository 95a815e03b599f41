"""Find the causes of lost time by the evidence of the normal run, and of runs in which parts were left out.

The normal run tells, for each rank, the seconds of a step by role and line (profile.py). A role's time that all
ranks spend is the job's; what one rank spends beyond the others makes them wait. Of the other runs, with T(...)
the time of a step:

    exchange     T(normal) - T(without exchange) - waiting for the slowest rank
    contention   T(computing, quickest of N ranks without exchange) - T(computing, one rank alone)
    overhead     2 T(alone) - T(alone, twice the batch), less what lines of the user take in each step

Pure functions: nothing is started here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean, median, pstdev
from typing import Any

import numpy as np

from hvd_trainer.observe.stacks import WORKER
from hvd_trainer.tools.diagnose.machine_use import MachineUse
from hvd_trainer.tools.diagnose.profile import (
    MAIN,
    Blame,
    RankProfile,
    Seconds,
    Stack,
    blame,
    hottest_line,
    library_line,
    user_frames,
)
from hvd_trainer.utils.text import plural

NORMAL, NO_EXCHANGE = "normal", "without exchange"
ALONE, TWICE, ONE_THREAD = "one rank alone", "alone, twice the batch", "one thread per rank"
CAUSES = {
    "data waits": "waiting for data",
    "data computes": "computing the data",
    "model": "waiting within the model",
    "loss": "the loss function",
    "backward": "your own code in the backward pass",
    "update": "the optimizer's update",
    "metric": "metrics",
    "callback": "a callback",
    "script": "your own code between the batches",
    "gil": "a thread that holds the GIL",
    "programs": "other programs on the ranks' cores",
    "throttled": "a limit on the CPU time of this machine",
    "swap": "memory that is swapped to the disk",
    "more work": "a rank that has more to do",
    "slow line": "a rank that waits or computes longer than the others",
    "slow rank": "a rank that is slower at the same work",
    "hiccups": "slow steps now and then",
    "exchange": "exchanging gradients",
    "contention": "ranks in each other's way on this machine's CPUs",
    "overhead": "overhead per step, however small the batch is",
}
"""The causes of lost time, in words."""
MIN_SHARE = 0.05
"""Fraction of a step below which a cause is not worth an action."""
MIN_LIBRARY_SHARE = 0.15
"""The same fraction for an update, a loss or a metric in which no line of the user's code runs."""
MIN_OTHER_CORES = 0.15
"""Cores that other programs use, from which they can be a cause."""
MIN_MORE = 1.1
"""How many times as many elements a rank that has more to do must have."""
MIN_SWAPPED = 1000
"""Pages that go to the swap or come from it in a run, from which it is a cause."""
NOISE = 0.05
"""Relative standard error of the time of a step in one run, at least."""
SIGMAS = 2.0
"""Standard errors on either side of a figure that its interval has: 95 %."""

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


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """All that is known of a job."""

    profiles: Sequence[RankProfile]
    """of the normal runs, in rank order; at least one"""
    machine: MachineUse = field(default_factory=MachineUse)
    cores: int = 1
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

    @property
    def step_s(self) -> float:
        """Mean seconds of a step of the normal run."""
        return mean(profile.step_s for profile in self.profiles)

    @property
    def run_cores(self) -> float:
        """Cores that the job keeps busy."""
        return sum(profile.cores for profile in self.profiles)

    @property
    def free_cores(self) -> float:
        """Cores that nothing keeps busy."""
        return max(0.0, self.cores - self.run_cores - self.machine.other_cores)

    def figure(self, trial: str, name: str = "step_s") -> tuple[float, float] | None:
        """Return a figure's median over the runs of a trial, and its standard error; None if it was not run."""
        values = [float(figures[name]) for figures in self.runs.get(trial, ()) if name in figures]
        if not values:
            return None
        error = max(NOISE * median(values), pstdev(values)) / math.sqrt(len(values))
        return median(values), error


@dataclass(frozen=True, kw_only=True)
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
    where: Blame | None = None
    """the line to blame"""
    rank: int | None = None
    """the rank that is to blame; None: all"""
    details: Figures = field(default_factory=dict)

    @property
    def is_clear(self) -> bool:
        """Whether it is more than the noise."""
        return self.seconds > SIGMAS * self.error


def find_causes(evidence: Evidence) -> list[Cause]:
    """Return the causes that are worth an action and more than the noise, the largest first."""
    found = [
        *_of_roles(evidence),
        *_of_stragglers(evidence),
        *_of_the_machine(evidence),
        *_of_hiccups(evidence),
    ]
    found += _of_other_runs(evidence, found)
    limit = MIN_SHARE * evidence.step_s
    return sorted((c for c in found if c.seconds >= limit and c.is_clear), key=lambda c: -c.seconds)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f}"


def _tables(evidence: Evidence) -> list[dict[str, Seconds]]:
    return [profile.roles() for profile in evidence.profiles]


def _of_roles(evidence: Evidence) -> list[Cause]:
    """Return what all ranks spend outside of model and exchange."""
    tables = _tables(evidence)
    found = []
    for role in ("data", "loss", "backward", "update", "metric", "callback", "script", "model"):
        each = [table.get(role, Seconds()) for table in tables]
        rank = min(range(len(each)), key=lambda r: each[r].own)
        profile, its = evidence.profiles[rank], each[rank]
        line = blame(profile, role)
        seconds = its.own
        if role == "backward" or (role == "script" and line is not None):
            seconds = min(seconds, line.seconds if line else 0.0)
        if role == "model":
            seconds = min(its.blocked, line.seconds if line else 0.0)
        worth = MIN_SHARE if line is not None or role == "data" else MIN_LIBRARY_SHARE
        if role in ("loss", "update", "metric") and line is not None and line.frame.call.endswith(".step"):
            worth = MIN_LIBRARY_SHARE  # the script's own optimizer.step()
        if seconds < worth * evidence.step_s:
            continue
        kind = _kind_of_data(profile, its) if role == "data" else role
        blocked = its.blocked / max(its.own, 1e-9)
        how = "waits" if blocked > 0.5 else "computes"
        where = str(line) if line else _library_text(profile, role)
        text = f"{_ms(seconds)} of {_ms(evidence.step_s)} ms: {where}; it {how} (CPU time {_ms(its.cpu)} ms)"
        if role == "data":
            text += _about_workers(profile)
            line = _worker_line(profile) or line
            where = str(line) if line else where
            if profile.major_faults:
                text += f"; {profile.major_faults / profile.steps:.1f} page faults from the disk a step"
        found.append(
            Cause(
                kind=kind,
                seconds=seconds,
                error=its.error,
                evidence=text,
                where=line,
                details={"blocked": blocked, "library": where, "cpu_s": its.cpu},
            )
        )
    return found


def _library_text(profile: RankProfile, role: str) -> str:
    frame = library_line(profile, role)
    return "" if frame is None else f"{frame.place} {frame.name}{f', {frame.call}' if frame.call else ''}"


def _kind_of_data(profile: RankProfile, its: Seconds) -> str:
    """Tell data that computes from data that waits, in the loader's processes if it has some."""
    if profile.workers:
        fetching = _worker_seconds(profile)
        computes = fetching.cpu > 0.5 * fetching.own
    else:
        computes = its.cpu > 0.5 * its.own
    return "data computes" if computes else "data waits"


def _about_workers(profile: RankProfile) -> str:
    if not profile.workers:
        return ""
    fetching = _worker_seconds(profile)
    share = fetching.cpu / max(fetching.own, 1e-9)
    count = plural(len(profile.workers), "loader process", "loader processes")
    return f"; {count}: {share:.0%} of a fetch is CPU time"


def _worker_seconds(profile: RankProfile) -> Seconds:
    """Return the seconds that the loader's processes spend in the user's code."""
    worker, total = RankProfile(profile.workers), Seconds()
    for stack in worker.main():
        if user_frames(stack):
            total += worker.seconds_of(stack)
    return total


def _worker_line(profile: RankProfile) -> Blame | None:
    if not profile.workers:
        return None
    return blame(RankProfile(profile.workers), WORKER)


def _of_stragglers(evidence: Evidence) -> list[Cause]:
    """Return what one rank does longer than the others."""
    if evidence.ranks < 2:
        return []
    tables = _tables(evidence)
    busy = [sum(its.own for role, its in table.items() if role != "exchange") for table in tables]
    slowest = max(range(len(busy)), key=busy.__getitem__)
    others = [rank for rank in range(len(busy)) if rank != slowest]
    seconds = busy[slowest] - max(busy[rank] for rank in others)
    if seconds < MIN_SHARE * evidence.step_s:
        return []
    excess = {
        role: its.own - mean(tables[rank].get(role, Seconds()).own for rank in others)
        for role, its in tables[slowest].items()
        if role != "exchange"
    }
    role = max(excess, key=lambda name: excess[name])
    profile, its = evidence.profiles[slowest], tables[slowest][role]
    error = math.sqrt(sum(t.variance for rank in tables for name, t in rank.items() if name != "exchange"))
    line = (_worker_line(profile) if role == "data" else None) or blame(profile, role)
    per_step = [p.elements / p.steps for p in evidence.profiles]
    usual = mean(per_step[rank] for rank in others)
    given = {"role": role, "blocked": its.blocked / max(its.own, 1e-9)}
    theirs = mean(busy[rank] for rank in others)
    text = f"rank {slowest} takes {_ms(busy[slowest])} ms of its own a step, the others {_ms(theirs)}"
    if usual and per_step[slowest] > MIN_MORE * usual:
        ratio = per_step[slowest] / usual
        text += f"; its batches have {ratio:.3g} times as many elements"
        return [_straggler("more work", seconds, error, slowest, text, line, given | {"ratio": ratio})]
    is_alone = excess[role] > 0.5 * sum(value for value in excess.values() if value > 0)
    if line is not None and is_alone and (role != "model" or its.blocked > 0.5 * its.own):
        text += f"; {_ms(excess[role])} ms more at {line}"
        return [_straggler("slow line", seconds, error, slowest, text, line, given)]
    cpu = [sum(t.cpu for name, t in table.items() if name != "exchange") for table in tables]
    if line is not None and is_alone:
        text += f"; {_ms(excess[role])} ms more at {line}"
        given |= {"line": str(line)}
    text += (
        f", for batches of the same size; its CPU time is {_ms(cpu[slowest])} ms, that of the others "
        f"{_ms(mean(cpu[r] for r in others))}"
    )
    return [_straggler("slow rank", seconds, error, slowest, text, None, given)]


def _straggler(
    kind: str, seconds: float, error: float, rank: int, text: str, where: Blame | None, details: Figures
) -> Cause:
    return Cause(kind=kind, seconds=seconds, error=error, evidence=text, where=where, rank=rank, details=details)


def _of_the_machine(evidence: Evidence) -> list[Cause]:
    """Return what other threads and programs have taken from the main threads."""
    tables, machine, found = _tables(evidence), evidence.machine, []
    gils = [sum(its.gil for its in table.values()) for table in tables]
    rank = max(range(len(gils)), key=gils.__getitem__)
    if gils[rank] > MIN_SHARE * evidence.step_s:
        thread, line = _gil_holder(evidence.profiles[rank])
        text = (
            f"the main thread of rank {rank} waits {_ms(gils[rank])} of {_ms(evidence.step_s)} ms for the GIL, "
            f"which the thread {thread!r} has: {line}"
        )
        error = gils[rank] / math.sqrt(evidence.profiles[rank].blocks)
        details = {"thread": thread}
        found.append(
            Cause(
                kind="gil",
                seconds=gils[rank],
                error=error,
                evidence=text,
                where=line,
                rank=rank,
                details=details,
            )
        )
    queued = [sum(its.queued for role, its in table.items() if role != "exchange") for table in tables]
    # While a main thread waits for an exchange, the threads that carry it out may be in the queue.
    carried = [
        min(
            table.get("exchange", Seconds()).own,
            max(0.0, p.queued_s / p.steps - sum(its.queued for its in table.values())),
        )
        for table, p in zip(tables, evidence.profiles, strict=True)
    ]
    waits = [a + b for a, b in zip(queued, carried, strict=True)]
    rank = max(range(len(waits)), key=waits.__getitem__)
    seconds = min(waits[rank], evidence.step_s)
    by_others = _share_of_others(evidence)
    error = seconds / math.sqrt(evidence.profiles[rank].blocks)
    text = f"the threads of rank {rank} are in the queue for a CPU for {_ms(seconds)} of {_ms(evidence.step_s)} ms"
    if by_others > 0:
        named = f" ({machine.named})" if machine.named else ""
        busy = f"{machine.other_cores:.1f} of {plural(evidence.cores, 'core')}"
        about = f"{text}; other programs keep {busy} busy{named}"
        given = {"programs": machine.named}
        found.append(
            Cause(kind="programs", seconds=seconds * by_others, error=error, evidence=about, details=given)
        )
    if by_others < 1:
        about = f"{text}; the job itself keeps {evidence.run_cores:.1f} of {plural(evidence.cores, 'core')} busy"
        found.append(Cause(kind="contention", seconds=seconds * (1 - by_others), error=error, evidence=about))
    if machine.throttled > MIN_SHARE:
        about = f"a limit of the control group stopped the job for {machine.throttled:.0%} of the time"
        found.append(Cause(kind="throttled", seconds=machine.throttled * evidence.step_s, error=0, evidence=about))
    faults = max(p.major_faults / p.steps for p in evidence.profiles)
    if machine.swapped_pages > MIN_SWAPPED and faults >= 1:
        blocked = max(
            sum(its.blocked for role, its in table.items() if role not in ("exchange", "data")) for table in tables
        )
        about = f"{machine.swapped_pages} pages went to the swap or came from it; {faults:.0f} page faults a step"
        found.append(Cause(kind="swap", seconds=blocked, error=0, evidence=about))
    return found


def _share_of_others(evidence: Evidence) -> float:
    """Return the fraction of the time in the queue that is other programs' fault."""
    others = evidence.machine.other_cores
    if others < MIN_OTHER_CORES:
        return 0.0
    crowding = max(0.0, evidence.run_cores - 0.9 * evidence.cores + others / 2)
    return others / (others + crowding)


def _gil_holder(profile: RankProfile) -> tuple[str, Blame | None]:
    """Return the other thread of Python with the most CPU time, and its line."""
    threads: dict[str, list[Stack]] = {}
    for stack in profile.stacks:
        if stack.raw.thread != MAIN:
            threads.setdefault(stack.raw.thread, []).append(stack)
    if not threads:
        return "", None
    name = max(threads, key=lambda thread: sum(stack.raw.cpu_s for stack in threads[thread]))
    return name, hottest_line(threads[name], profile)


def _of_hiccups(evidence: Evidence) -> list[Cause]:
    """Return what slow steps take beyond typical ones."""
    lost = [profile.hiccups_s for profile in evidence.profiles]
    seconds = mean(lost)
    # The rank that is to blame is the one that does not wait for others meanwhile.
    slow = [
        {
            role: sum(s.raw.slow_s for s in profile.main() if s.role == role)
            for role in {s.role for s in profile.main()}
        }
        for profile in evidence.profiles
    ]
    worked = [sum(value for role, value in each.items() if role != "exchange") for each in slow]
    rank = max(range(len(worked)), key=worked.__getitem__)
    profile = evidence.profiles[rank]
    if seconds < MIN_SHARE * evidence.step_s or not profile.slow:
        return []
    own = {role: value for role, value in slow[rank].items() if role != "exchange"}
    role = max(own, key=lambda name: own[name]) if own else "exchange"
    line = blame(profile, role, slow=True)
    gaps = [b - a for a, b in zip(profile.slow, profile.slow[1:], strict=False)]
    is_regular = len(gaps) >= 2 and pstdev(gaps) < 0.35 * mean(gaps)
    if line is None and not is_regular:
        return []  # the machine's own, such as other programs' time slices
    size = sum(profile.durations[n] for n in profile.slow) / len(profile.slow) - profile.typical_s
    often = (
        f"every {mean(gaps):.0f} steps"
        if is_regular
        else f"{plural(len(profile.slow), 'time')} in {plural(profile.steps, 'step')}"
    )
    text = (
        f"{often} a step takes {_ms(size)} ms longer (typical: {_ms(profile.typical_s)} ms), on rank {rank} "
        f"in its {role}"
    )
    if line is not None:
        text += f": {line}"
    details = {"role": role, "period": mean(gaps) if is_regular else None, "size_s": size}
    error = seconds / math.sqrt(len(profile.slow)) / SIGMAS
    return [
        Cause(
            kind="hiccups",
            seconds=seconds,
            error=error,
            evidence=text,
            where=line,
            rank=None if evidence.ranks == 1 else rank,
            details=details,
        )
    ]


def _of_other_runs(evidence: Evidence, known: Sequence[Cause]) -> list[Cause]:
    """Return what the differences between runs show: exchange, contention, overhead."""
    found = []
    tables = _tables(evidence)
    straggler = sum(c.seconds for c in known if c.kind in ("more work", "slow line", "slow rank"))
    queued = sum(c.seconds for c in known if c.kind in ("programs", "gil"))
    exchanges = [table.get("exchange", Seconds()) for table in tables]
    least = min(exchanges, key=lambda its: its.own)
    seconds, error = least.own, least.error
    text = f"{_ms(seconds)} of {_ms(evidence.step_s)} ms a rank waits in the exchange that ends last"
    normal, without = evidence.figure(NORMAL), evidence.figure(NO_EXCHANGE)
    if normal is not None and without is not None:
        gained = normal[0] - without[0] - straggler - queued
        # What a program beside the job makes an exchange wait is no cost of the exchange.
        seconds = max(min(gained, max(seconds, gained)), 0.0)
        error = math.hypot(normal[1], without[1])
        text = f"a step takes {_ms(without[0])} ms without the exchange, {_ms(normal[0])} with it"
    elif queued:
        seconds = max(0.0, seconds - queued)
    if evidence.ranks > 1 and seconds >= MIN_SHARE * evidence.step_s:
        found.append(
            Cause(
                kind="exchange",
                seconds=seconds,
                error=error,
                evidence=text,
                details=_exchange_parts(evidence, seconds),
            )
        )
    alone, twice = evidence.figure(ALONE, "compute_s"), evidence.figure(TWICE, "compute_s")
    apart = evidence.figure(NO_EXCHANGE, "compute_s")
    if alone and apart and apart[0] > alone[0]:
        text = f"computing takes {_ms(apart[0])} ms beside the other ranks, {_ms(alone[0])} alone"
        already = sum(c.seconds for c in known if c.kind in ("contention", "programs"))
        error = math.hypot(alone[1], apart[1])
        found.append(
            Cause(
                kind="contention",
                seconds=max(0.0, apart[0] - alone[0] - already),
                error=error,
                evidence=text,
            )
        )
    if alone and twice:
        fixed = sum(c.seconds for c in known if c.kind in ("callback", "update", "script", "model", "hiccups"))
        overhead = min(2 * alone[0] - twice[0], alone[0]) - fixed
        error = math.hypot(2 * alone[1], twice[1])
        text = f"one rank computes {_ms(alone[0])} ms a step, and {_ms(twice[0])} for twice the batch"
        details = {"more_s": max(twice[0] - alone[0], 0.0)}
        found.append(Cause(kind="overhead", seconds=overhead, error=error, evidence=text, details=details))
    return found


BYTES = {"none": 4, "fp16": 2, "bf16": 2, "powersgd": 4}
"""Bytes of a gradient's element on the wire; of PowerSGD, which sends far fewer, an upper bound."""


def _exchange_parts(evidence: Evidence, seconds: float) -> dict[str, float]:
    """Return the seconds that latency and bandwidth take of an exchange, and how much of it backward hides."""
    if evidence.line is None or "parameters" not in evidence.facts:
        return {}
    num_bytes = evidence.facts["parameters"] * BYTES[evidence.facts.get("compression", "none")]
    pieces = max(1, -(-num_bytes // int(evidence.facts.get("bucket_mb", 25) * 2**20)))
    latency, bandwidth = evidence.line.parts(num_bytes, pieces)
    part = seconds / (latency + bandwidth)
    return {
        "latency_s": latency * part,
        "bandwidth_s": bandwidth * part,
        "hidden": max(0.0, 1 - part),
        "pieces": pieces,
    }
