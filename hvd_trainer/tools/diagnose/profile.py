"""Read the stacks that the ranks have sampled (`measure/stacks.py`), and tell by them what the time went to."""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median

import msgspec
from msgspec import Struct
from msgspec.structs import astuple

from hvd_trainer.measure.collective_calls import ENGINES
from hvd_trainer.measure.stack_record import (
    AFTER_STEP,
    FOLDER,
    MAIN,
    WORKER,
    CallCount,
    Frame,
    Record,
    StackCount,
    Switches,
)
from hvd_trainer.measure.stacks import slow_from

BETWEEN_STEPS = ("start", "epoch", "save", "evaluate", "end")
"""Phases that are no part of a step."""
IN_TRAINER = {
    "callback.on_step_end": "callback",
    "self._interrupts.after_step": "trainer",
    "self.loss": "loss",
    "meter.add": "metric",
    "self.model": "model",
    "scaled.backward": "backward",
    "prefetch": "data",
}
"""Roles of the Trainer's calls."""
OUT_OF_PHASE = ("metric", "callback")
"""Roles of calls that the Trainer makes before it begins another phase."""
LOOP, STEP = "/hvd_trainer/training/loop.py", "/hvd_trainer/optim/step.py"
CONTEXTS = (
    ("/torch/optim/lr_scheduler.py", "update"),
    ("/torch/utils/data/", "data"),
    ("/torch/nn/modules/loss.py", "loss"),
    ("/torch/nn/modules/module.py", "model"),
    ("/torch/autograd/", "backward"),
)
"""Roles by the folder of the code, from the outermost frame on."""
INNER = (
    ("/torch/distributed/", "exchange"),
    ("/horovod/", "exchange"),
    ("/hvd_trainer/hvd/", "exchange"),
    ("/torch/optim/", "update"),
)
"""Roles by the folder of the code, from the innermost frame on; they come before the others in a script."""
WAITING = ("exchange", "collective")
"""Roles in which a rank waits for others: exchanging gradients, and collectives that the user's code calls."""
START = "start"
"""The role of starting a loader's processes, and of ending them."""
LOADER, STARTING = "/torch/utils/data/dataloader.py", ("__init__", "_shutdown_workers")
"""The file and the functions that do."""
LONE = "lone"
"""The role of what only one rank does (lone.py)."""
EXCHANGING = ("/torch/distributed/", "/horovod/", "/hvd_trainer/hvd/", "/hvd_trainer/backends/")
"""Folders of collectives."""
OTHER_PHASES = ("data", "forward", "backward")
"""Phases in which no optimizer updates anything."""
BY_PHASE = {"reduce": "exchange", "forward": "model", "step": "update", "callback": "callback"}
MAX_SLOW = 0.2
"""Fraction of steps up to which slow ones are hiccups; where more are slow, that is how the job is."""
MIN_HOT = 0.5
"""Fraction of a role's time that a line must have, with what it calls, to be named."""


class Stack(Struct):
    """The seconds of a stack."""

    role: str
    frames: tuple[Frame, ...]
    raw: StackCount
    first: int = 0
    """the frame from which only one rank does it"""


class Calls(Struct):
    """The calls of a collective from a line of the user's code."""

    per_step: float = 0.0
    bytes: float = 0.0
    """of a call, in the mean"""
    function: str = ""


class Seconds(Struct):
    """Seconds of a step, and how they were spent."""

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

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(*map(operator.add, astuple(self), astuple(other)))


class RankProfile:
    """The sampled stacks of a rank, of one run or of several.

    Args:
        records: one of each run; at least one.
        workers: those of the loader's processes.
    """

    def __init__(self, records: Sequence[Record], workers: Sequence[Record] = ()) -> None:
        self.records, self.workers = records, workers
        self.durations = [seconds for record in records for seconds in record.durations]
        self.steps = max(1, len(self.durations))
        self.seconds = sum(record.seconds for record in records)
        self.blocks = max(1, sum(record.blocks for record in records))
        self.on_trainer = any(record.on_trainer for record in records)
        self.uses_gpu = any(record.uses_gpu for record in records)
        self.cpu_s = sum(record.cpu_s for record in records)
        self.in_kernel = sum(record.system_s for record in records) / max(self.cpu_s, 1e-9)
        """fraction of its CPU time"""
        self.queued_s = sum(record.queued_s for record in records)
        self.elements = sum(record.elements for record in records)
        self.major_faults = sum(record.major_faults for record in records)
        self.switches = records[-1].switches if records else Switches()
        self.starts = [record.starts for record in records]
        self.stacks = [stack for record in records for stack in read_stacks(record)]
        limit = slow_from(self.durations) if self.durations else math.inf
        slow = [number for number, seconds in enumerate(self.durations) if seconds > limit]
        # Of N loader processes that are too slow, each N-th batch is late, and the others have come meanwhile.
        max_slow = min(MAX_SLOW, 0.8 / max(self.processes, 1)) * self.steps
        self.slow = slow if len(slow) < max_slow else []
        """the numbers of steps that are slow now and then"""

    @property
    def cores(self) -> float:
        """Cores that this rank keeps busy, with the loader's processes."""
        ended = sum(record.children_s for record in self.records)
        # Processes that have ended may have written their own records, too.
        loading = max(ended, sum(record.cpu_s for record in self.workers))
        return (self.cpu_s + loading) / max(self.seconds, 1e-9)

    @property
    def starts_s(self) -> float:
        """Seconds of a step in which the rank waits until the loader's processes are started or have ended."""
        return sum(starts.seconds for starts in self.starts) / self.steps

    def calls_at(self, frame: Frame) -> Calls:
        """Return the calls of collectives from a line."""
        counts = [count for record in self.records for count in calls_at(record, frame)]
        calls = sum(count.calls for count in counts)
        size = sum(count.bytes for count in counts) / max(calls, 1)
        function = max(counts, key=lambda count: count.calls).function if counts else ""
        return Calls(calls / self.steps, size, function)

    @property
    def processes(self) -> int:
        """How many loader processes there were at once."""
        return math.ceil(sum(worker.seconds for worker in self.workers) / max(self.seconds, 1e-9) - 0.2)

    @property
    def typical_s(self) -> float:
        """Median seconds of a step; of a run without a whole step, its length."""
        return median(self.durations) if self.durations else self.seconds

    @property
    def step_s(self) -> float:
        """Mean seconds of a step."""
        return sum(self.durations) / self.steps if self.durations else self.seconds

    @property
    def hiccups_s(self) -> float:
        """Seconds of a step, in the mean, by which slow steps are longer than typical ones, without the queue."""
        longer_s = sum(self.durations[number] - self.typical_s for number in self.slow) / self.steps
        return max(0.0, longer_s - self.slow_queued_s)

    @property
    def slow_queued_s(self) -> float:
        """Seconds of a step, in the mean, for which slow steps wait for a CPU longer than typical ones."""
        if not self.slow:
            return 0.0
        slow_s = sum(stack.raw.slow_queued_s for stack in self.main())
        typical_s = (sum(stack.raw.queued_s for stack in self.main()) - slow_s) / (self.steps - len(self.slow))
        return max(0.0, slow_s - typical_s * len(self.slow)) / self.steps

    def main(self) -> Iterator[Stack]:
        """Yield the stacks of the main thread within steps."""
        for stack in self.stacks:
            if stack.raw.thread == MAIN and stack.raw.phase not in BETWEEN_STEPS:
                yield stack

    def roles(self) -> dict[str, Seconds]:
        """Return the seconds of a typical step by role."""
        table: dict[str, Seconds] = defaultdict(Seconds)
        for stack in self.main():
            cost = self.seconds_of(stack)
            if stack.role == "backward" and not self.uses_gpu and not user_frames(stack):
                # A CPU computes in this thread, but DDP waits there for other ranks.
                table["exchange"] += Seconds(cost.blocked, variance=cost.variance)
                cost = Seconds(cost.wall - cost.blocked, cost.cpu, cost.queued, cost.gil, cost.variance)
            table[stack.role] += cost
        return table

    def slow_s(self, stack: Stack) -> float:
        """Return the seconds of a stack in slow steps, all together."""
        return stack.raw.slow_s if self.slow else 0.0

    def seconds_of(self, stack: Stack) -> Seconds:
        """Return the seconds of a stack in a typical step."""
        raw, steps = stack.raw, max(1, self.steps - len(self.slow))
        kept = max(0.0, 1 - self.slow_s(stack) / raw.wall_s) if raw.wall_s else 1.0
        variance = max(raw.squares - raw.wall_s**2 / self.blocks, 0.0) * (kept / steps) ** 2
        wall, cpu, gil = (kept * value / steps for value in (raw.wall_s, raw.cpu_s, raw.gil_s))
        queued = raw.queued_s - (raw.slow_queued_s if self.slow else 0.0)
        return Seconds(wall, cpu, queued / steps, gil, variance)


def read_stacks(record: Record) -> Iterator[Stack]:
    """Yield the stacks of a file, each with its role."""
    for raw in record.stacks:
        frames = tuple(record.frames[number] for number in raw.frames)
        start = max((n for n, frame in enumerate(frames) if LOOP in frame.file), default=None)
        inside = frames if start is None else frames[start:]
        # Where no batch was seen, what comes after a step may be the next one's forward pass.
        phase = raw.phase if raw.phase != AFTER_STEP or record.elements else "forward"
        yield Stack(role_of(phase, inside, in_trainer=start is not None), inside, raw)


def calls_at(record: Record, frame: Frame) -> list[CallCount]:
    """Return the calls of collectives from a line, by functions and places in it."""
    place = frame.file, frame.line
    return [
        call for call in record.calls if place == (record.frames[call.frame].file, record.frames[call.frame].line)
    ]


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


def read_profiles(log: Path) -> list[RankProfile]:
    """Return the profiles of a run, in rank order; empty if there are none."""
    files = list((log / FOLDER).glob("rank-*.json"))
    ranks = sorted((file for file in files if "worker" not in file.name), key=lambda file: int(file.stem[5:]))
    return [
        RankProfile(
            [_read(file)], [_read(other) for other in files if other.name.startswith(f"{file.stem}.worker")]
        )
        for file in ranks
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
        for of_rank in zip(*runs, strict=False)
    ]


def role_of(phase: str, frames: Sequence[Frame], *, in_trainer: bool) -> str:
    """Return what a stack does for a step: data, model, loss, backward, exchange, update, metric, callback, ...

    Args:
        phase: that the rank was in.
        frames: from the training loop on, or all of a script.
    """
    if phase != WORKER and is_own_collective(frames):
        return "collective"
    if any(frame.file.endswith(LOADER) and frame.name.endswith(STARTING) for frame in frames):
        return START
    calls = (frame.call for frame in frames if LOOP in frame.file or STEP in frame.file)
    in_call = next((IN_TRAINER[call] for call in calls if call in IN_TRAINER), None)
    if phase in ("reduce", "data", WORKER) and in_call not in OUT_OF_PHASE:
        return BY_PHASE.get(phase, phase)
    if in_call is not None:
        return in_call
    if not in_trainer:
        if (
            frames and frames[-1].name == "_distributed_broadcast_coalesced"
        ):  # of DistributedDataParallel's buffers
            return "exchange"
        for frame in reversed(frames):
            for folder, role in INNER:
                # A step that is given a closure, as Lightning's, calls what is another phase.
                if folder in frame.file and (role != "update" or phase not in OTHER_PHASES):
                    return role
        for frame in frames:
            if "/torch/nn/functional.py" in frame.file and frame.name.endswith(("loss", "cross_entropy")):
                return "loss"
    for frame in frames:
        for folder, role in CONTEXTS:
            if folder in frame.file:
                # After a step a model's forward pass is an evaluation.
                return "script" if phase == AFTER_STEP and role in ("model", "loss") else role
    if not in_trainer and phase in ("forward", "callback", AFTER_STEP):
        return "own forward" if phase == "forward" else "script"
    return BY_PHASE.get(phase, phase)


def is_own_collective(frames: Sequence[Frame]) -> bool:
    """Return whether a stack is in a collective that the user's code calls, or waits for one."""
    last = max((n for n, frame in enumerate(frames) if frame.owner == "user"), default=None)
    if last is None:
        return False
    below = frames[last + 1 :]
    if not below:  # what an asynchronous call returns waits in C++
        return frames[last].call.endswith(".wait")
    if any(part in frame.file for frame in below for part in ENGINES):
        return False
    return any(folder in frame.file for frame in below for folder in EXCHANGING)


class Blame(Struct, frozen=True):
    """The line of code that most of a role's time goes to."""

    seconds: float
    """of a step"""
    frame: Frame
    entry: Frame
    """the user's line through which it is reached"""

    def __str__(self) -> str:
        if (self.entry.file, self.entry.line) == (self.frame.file, self.frame.line):
            return str(self.frame)
        return f"{self.frame} (from {self.entry.place} {self.entry.name})"


BELOW = {
    "backward": "/torch/autograd/",
    "model": "/torch/nn/modules/module.py",
    WORKER: "/torch/utils/data/_utils/worker.py",
}
"""Roles of which only lines count that are called from a folder, and not the line that begins it."""


def blame(profile: RankProfile, role: str) -> Blame | None:
    """Return the user's line that most of a role's time goes to; None if no user's line has any."""
    return hottest_line([stack for stack in profile.main() if stack.role == role], profile)


def user_frames(stack: Stack, *, whole: bool = False) -> list[Frame]:
    """Return the frames of the user's code that count for a stack's role, or all of them, the outermost first."""
    if stack.role == LONE:
        return [frame for frame in stack.frames[stack.first :] if frame.owner == "user"]
    first = "" if whole else BELOW.get(stack.role, "")
    begin = next((n for n, frame in enumerate(stack.frames) if first in frame.file), len(stack.frames))
    frames = [frame for frame in stack.frames[begin:] if frame.owner == "user"]
    # Of a script, the line that calls main() is in all stacks.
    return frames[1:] if len(frames) > 1 and frames[0].name == "<module>" else frames


def hottest_line(
    stacks: Iterable[Stack], profile: RankProfile, *, slow: bool = False, whole: bool = False
) -> Blame | None:
    """Return the deepest user's line that has most of the time that these stacks spend in user's lines.

    Args:
        stacks: whose time counts.
        profile: of the rank.
        slow: only the time in slow steps counts, in all of the user's lines.
        whole: all time counts.
    """
    own: list[tuple[float, list[Frame]]] = []
    for stack in stacks:
        raw, frames = stack.raw, user_frames(stack, whole=slow)
        slow_s = profile.slow_s(stack)
        left_out_s = 0.0 if whole else slow_s
        seconds = slow_s if slow else max(raw.wall_s - left_out_s - raw.queued_s - raw.gil_s, 0.0)
        if frames and seconds > 0:
            own.append((seconds / profile.steps, frames))
    if not own:
        return None
    lines: dict[tuple[int, str, int], float] = defaultdict(float)
    for seconds, frames in own:
        for depth, frame in enumerate(frames):
            lines[depth, frame.file, frame.line] += seconds
    total = sum(seconds for seconds, _ in own)
    limit = min(MIN_HOT * total, max(lines.values()))
    depth, file, line = max(key for key, seconds in lines.items() if seconds >= limit)
    through = [
        (seconds, frames)
        for seconds, frames in own
        if len(frames) > depth and (frames[depth].file, frames[depth].line) == (file, line)
    ]
    _, frames = max(through, key=lambda pair: pair[0])
    return Blame(total, frames[depth], frames[0])


def library_line(profile: RankProfile, role: str) -> Frame | None:
    """Return the innermost frame of a library that has most of a role's time."""
    seconds: dict[Frame, float] = defaultdict(float)
    for stack in profile.main():
        if stack.role == role and stack.frames:
            seconds[stack.frames[-1]] += stack.raw.wall_s
    return max(seconds, key=lambda frame: seconds[frame], default=None)
