"""Read the stacks that the ranks have sampled (`measure/stacks.py`), and tell by them what the time went to."""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Literal

import msgspec
from msgspec import Struct
from msgspec.structs import astuple

from hvd_trainer.measure.stack_record import (
    AFTER_STEP,
    FOLDER,
    MAIN,
    WORKER,
    CallCount,
    Frame,
    LoaderStarts,
    Record,
    StackCount,
    Switches,
)
from hvd_trainer.measure.stacks import slow_from
from hvd_trainer.tools.diagnose.roles import LONE, LOOP, WAITING, role_of

BETWEEN_STEPS = ("start", "epoch", "save", "evaluate", "end")
"""Phases that are no part of a step."""
MAX_SLOW = 0.2
"""Fraction of steps up to which slow ones are hiccups; where more are slow, that is how the job is."""
MIN_HOT = 0.5
"""Fraction of a role's time that a line must have, with what it calls, to be named."""
MIN_LONE = 0.05
"""Fraction of a rank's time from which a line is its own: of a shorter one, looks may miss the other ranks."""
MIN_LOOKS = 10
"""Looks on one rank that would hardly have missed the others, if these were as often at a line."""
BELOW = {
    "backward": "/torch/autograd/",
    "model": "/torch/nn/modules/module.py",
    WORKER: "/torch/utils/data/_utils/worker.py",
}
"""Roles of which only lines count that are called from a folder, and not the line that begins it."""


class Seconds(Struct):
    """Seconds of a step, in the mean, and how they were spent."""

    wall: float = 0.0
    cpu: float = 0.0
    queued: float = 0.0
    gil: float = 0.0
    variance: float = 0.0
    """of the mean of `wall` over the steps"""

    @property
    def own(self) -> float:
        """Without what other programs and threads have taken."""
        return max(self.wall - self.queued - self.gil, 0.0)

    @property
    def blocked(self) -> float:
        """Neither on a CPU nor ready to run."""
        return max(self.own - self.cpu, 0.0)

    @property
    def error(self) -> float:
        """Standard error of `wall`."""
        return math.sqrt(self.variance)

    @property
    def waits(self) -> bool:
        """Whether most of its own time is spent waiting."""
        return self.blocked > 0.5 * self.own

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(*map(operator.add, astuple(self), astuple(other)))


class Stack(Struct):
    """A stack of a thread, and its seconds of a step."""

    role: str
    thread: str
    phase: str
    frames: tuple[Frame, ...]
    looks: int
    whole: Seconds
    """of all steps"""
    typical: Seconds
    """of the steps that are not slow"""
    slow: Seconds
    """the part of `whole` that is spent in slow steps"""
    first: int = 0
    """the frame from which only one rank does it"""

    def user_frames(self, *, whole: bool = False) -> list[Frame]:
        """Return the frames of the user's code that count for the role, or all of them, the outermost first."""
        if self.role == LONE:
            return [frame for frame in self.frames[self.first :] if frame.owner == "user"]
        below = "" if whole else BELOW.get(self.role, "")
        begin = next((n for n, frame in enumerate(self.frames) if below in frame.file), len(self.frames))
        frames = [frame for frame in self.frames[begin:] if frame.owner == "user"]
        # Of a script, the line that calls main() is in all stacks.
        return frames[1:] if len(frames) > 1 and frames[0].name == "<module>" else frames


class RankProfile:
    """The sampled stacks of a rank, of one run or of several.

    Args:
        records: one of each run; at least one.
        workers: those of the loader's processes.
    """

    def __init__(self, records: Sequence[Record], workers: Sequence[Record] = ()) -> None:
        def total(name: str) -> float:
            return float(sum(getattr(record, name) for record in records))

        self.records, self.workers = records, workers
        self.durations = [seconds for record in records for seconds in record.durations]
        self.steps, self.blocks = max(1, len(self.durations)), max(1, total("blocks"))
        self.seconds, self.cpu_s, self.queued_s = total("seconds"), total("cpu_s"), total("queued_s")
        self.in_kernel = total("system_s") / max(self.cpu_s, 1e-9)
        """fraction of its CPU time"""
        self.elements, self.major_faults = (total(name) / self.steps for name in ("elements", "major_faults"))
        """of a step"""
        self.on_trainer = any(record.on_trainer for record in records)
        self.uses_gpu = any(record.uses_gpu for record in records)
        self.switches = records[-1].switches if records else Switches()
        self.starts = LoaderStarts(*map(sum, zip(*(astuple(record.starts) for record in records), strict=True)))
        self.processes = math.ceil(sum(worker.seconds for worker in workers) / max(self.seconds, 1e-9) - 0.2)
        """how many loader processes there were at once"""
        self.typical_s = median(self.durations) if self.durations else self.seconds
        """median seconds of a step; of a run without a whole step, its length"""
        self.step_s = sum(self.durations) / self.steps if self.durations else self.seconds
        """mean seconds of a step"""
        limit = slow_from(self.durations) if self.durations else math.inf
        slow = [number for number, seconds in enumerate(self.durations) if seconds > limit]
        # Of N loader processes that are too slow, each N-th batch is late, and the others have come meanwhile.
        max_slow = min(MAX_SLOW, 0.8 / max(self.processes, 1)) * self.steps
        self.slow = slow if len(slow) < max_slow else []
        """the numbers of steps that are slow now and then"""
        self.stacks = [self._read(record, raw) for record in records for raw in record.stacks]

    def _read(self, record: Record, raw: StackCount) -> Stack:
        """Return a stack with its role and its seconds."""
        frames = tuple(record.frames[number] for number in raw.frames)
        start = max((n for n, frame in enumerate(frames) if LOOP in frame.file), default=None)
        frames = frames if start is None else frames[start:]
        # Where no batch was seen, what comes after a step may be the next one's forward pass.
        phase = raw.phase if raw.phase != AFTER_STEP or record.elements else "forward"
        slow_s, slow_queued_s = (raw.slow_s, raw.slow_queued_s) if self.slow else (0.0, 0.0)
        usual = max(1, self.steps - len(self.slow))
        kept = (max(0.0, 1 - slow_s / raw.wall_s) if raw.wall_s else 1.0) / usual
        variance = max(raw.squares - raw.wall_s**2 / self.blocks, 0.0) * kept**2
        spent = raw.wall_s, raw.cpu_s, raw.queued_s, raw.gil_s
        wall, cpu, _, gil = (kept * seconds for seconds in spent)
        return Stack(
            role=role_of(phase, frames, in_trainer=start is not None),
            thread=raw.thread,
            phase=raw.phase,
            frames=frames,
            looks=raw.looks,
            whole=Seconds(*(seconds / self.steps for seconds in spent)),
            typical=Seconds(wall, cpu, (raw.queued_s - slow_queued_s) / usual, gil, variance),
            slow=Seconds(wall=slow_s / self.steps, queued=slow_queued_s / self.steps),
        )

    @cached_property
    def loading(self) -> RankProfile | None:
        """The loader's processes as one; None if it has none."""
        return RankProfile(self.workers) if self.workers else None

    @property
    def cores(self) -> float:
        """Cores that this rank keeps busy, with the loader's processes."""
        ended = sum(record.children_s for record in self.records)
        # Processes that have ended may have written their own records, too.
        loading = max(ended, sum(record.cpu_s for record in self.workers))
        return (self.cpu_s + loading) / max(self.seconds, 1e-9)

    @property
    def slow_queued_s(self) -> float:
        """Seconds of a step, in the mean, for which slow steps wait for a CPU longer than typical ones."""
        part = len(self.slow) / self.steps
        return max(0.0, sum(stack.slow.queued - part * stack.typical.queued for stack in self.main()))

    @property
    def hiccups_s(self) -> float:
        """Seconds of a step, in the mean, by which slow steps are longer than typical ones, without the queue."""
        longer_s = sum(self.durations[number] - self.typical_s for number in self.slow) / self.steps
        return max(0.0, longer_s - self.slow_queued_s)

    def main(self, *roles: str) -> Iterator[Stack]:
        """Yield the stacks of the main thread within steps, of some roles or of all."""
        for stack in self.stacks:
            if stack.thread == MAIN and stack.phase not in BETWEEN_STEPS and (not roles or stack.role in roles):
                yield stack

    def roles(self) -> dict[str, Seconds]:
        """Return the seconds of a typical step by role."""
        table: dict[str, Seconds] = defaultdict(Seconds)
        for stack in self.main():
            cost = stack.typical
            if stack.role == "backward" and not self.uses_gpu and not stack.user_frames():
                # A CPU computes in this thread, but DDP waits there for other ranks.
                table["exchange"] += Seconds(cost.blocked, variance=cost.variance)
                cost = Seconds(cost.wall - cost.blocked, cost.cpu, cost.queued, cost.gil, cost.variance)
            table[stack.role] += cost
        return table


def calls_at(record: Record, frame: Frame) -> list[CallCount]:
    """Return the calls of collectives from a line, by functions and places in it."""
    frames = ((call, record.frames[call.frame]) for call in record.calls)
    return [call for call, other in frames if other.location == frame.location]


def together_s(profiles: Sequence[RankProfile], frame: Frame) -> float | None:
    """Return the mean seconds of a call from a line on the rank that arrives last; None if unknown.

    The others have waited for that one, whatever it did before.
    """
    least: list[float] = []
    for records in zip(*(profile.records for profile in profiles), strict=False):
        each = [{call.function: call for call in calls_at(record, frame)} for record in records]
        for function in set(each[0]).intersection(*each[1:]):
            calls = [by_function[function] for by_function in each]
            first = max(call.first for call in calls)
            timed = (call.seconds[first - call.first :] for call in calls)
            least += [min(seconds) for seconds in zip(*timed, strict=False)]
    return sum(least) / len(least) if least else None


def read_profiles(log: Path, ranks: int) -> list[RankProfile]:
    """Return the profiles of a run, in rank order; empty if a rank has left none, for which others may wait."""
    files = [log / FOLDER / f"rank-{rank}.json" for rank in range(ranks)]
    if not all(file.exists() for file in files):
        return []
    workers = (file.parent.glob(f"{file.stem}.worker-*.json") for file in files)
    return [
        RankProfile([_read(file)], [*map(_read, of_rank)]) for file, of_rank in zip(files, workers, strict=True)
    ]


def _read(file: Path) -> Record:
    return msgspec.json.decode(file.read_bytes(), type=Record)


def merge(runs: Sequence[Sequence[RankProfile]]) -> list[RankProfile]:
    """Return the profiles of several runs as one, rank by rank."""
    return [
        RankProfile(
            [record for each in of_rank for record in each.records],
            [record for each in of_rank for record in each.workers],
        )
        for of_rank in zip(*runs, strict=True)
    ]


def mark_lone(profiles: Sequence[RankProfile]) -> None:
    """Give the role `LONE` to stacks through lines that have much of one rank's time and were seen on no other."""
    seen = [{f.location for s in p.stacks for f in s.frames if f.owner == "user"} for p in profiles]
    for rank, profile in enumerate(profiles if len(profiles) > 1 else ()):
        others = set().union(*(lines for number, lines in enumerate(seen) if number != rank))
        through: dict[tuple[str, int], list[Stack]] = defaultdict(list)
        for stack in profile.main():
            frames = enumerate(stack.frames)
            first = next((n for n, f in frames if f.owner == "user" and f.location not in others), None)
            if stack.role not in WAITING and first is not None:
                stack.first = first
                through[stack.frames[first].location].append(stack)
        for stacks in through.values():
            own_s = profile.steps * sum(stack.whole.own for stack in stacks)
            if own_s >= MIN_LONE * profile.seconds and sum(stack.looks for stack in stacks) >= MIN_LOOKS:
                for stack in stacks:
                    stack.role = LONE


class Blame(Struct, frozen=True):
    """The line of code that most of a role's time goes to."""

    seconds: float
    """of a step"""
    frame: Frame
    entry: Frame
    """the user's line through which it is reached"""

    def __str__(self) -> str:
        if self.entry.location == self.frame.location:
            return str(self.frame)
        return f"{self.frame} (from {self.entry.place} {self.entry.name})"


def hottest_line(stacks: Iterable[Stack], steps: Literal["typical", "whole", "slow"] = "typical") -> Blame | None:
    """Return the deepest user's line that has most of the time that these stacks spend in user's lines.

    Args:
        stacks: whose time counts.
        steps: in which it does; in slow ones all of the user's lines count, whatever the role.
    """
    own: list[tuple[float, list[Frame]]] = []
    for stack in stacks:
        if frames := stack.user_frames(whole=steps == "slow"):
            own.append((getattr(stack, steps).own, frames))
    lines: dict[tuple[int, tuple[str, int]], float] = defaultdict(float)
    for seconds, frames in own:
        for depth, frame in enumerate(frames):
            lines[depth, frame.location] += seconds
    total = sum(seconds for seconds, _ in own)
    if total <= 0:
        return None
    limit = min(MIN_HOT * total, max(lines.values()))
    depth, location = max(key for key, seconds in lines.items() if seconds >= limit)
    through = [pair for pair in own if len(pair[1]) > depth and pair[1][depth].location == location]
    _, frames = max(through, key=lambda pair: pair[0])
    return Blame(total, frames[depth], frames[0])


def library_line(stacks: Iterable[Stack]) -> Frame | None:
    """Return the innermost frame of a library that has most of the time of these stacks."""
    seconds: dict[Frame, float] = defaultdict(float)
    for stack in stacks:
        if stack.frames:
            seconds[stack.frames[-1]] += stack.whole.wall
    return max(seconds, key=lambda frame: seconds[frame], default=None)
