"""Sample the stacks of a rank while it trains, and count them in LOG_DIR/stacks/rank-0.json.

A thread looks every few milliseconds where the main thread is. What the system has counted since the last look
(time on a CPU, time in the queue for one) is added to that stack:

    wall     |------------------------- since the last look -------------------------|
             | on a CPU | in the queue for a CPU | another thread has the GIL | waits |
"""

from __future__ import annotations

import os
import random
import resource
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import torch
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from hvd_trainer.measure.collective_calls import CollectiveCalls
from hvd_trainer.measure.listener import Listener, Step
from hvd_trainer.measure.machine import cpu_seconds
from hvd_trainer.measure.stack_record import (
    AFTER_STEP,
    FOLDER,
    LOADER_START,
    MAIN,
    WORKER,
    LoaderStarts,
    Place,
    Record,
    StackCount,
    describe_frame,
)
from hvd_trainer.measure.switches import SwitchReader
from hvd_trainer.utils import accelerator
from hvd_trainer.utils.files import atomic_write
from hvd_trainer.utils.import_hooks import wrap
from hvd_trainer.utils.process import cpu_ids
from hvd_trainer.utils.tensors import tensors_in

PERIOD_S = 0.005
"""Mean time between two looks; it varies, so that it does not keep in step with the training's own period."""
WARMUP_STEPS = 5
"""Steps at the beginning that do not count, unless the training ends with them."""
WRITE_EVERY_S = 2.0
"""So that a rank that is killed leaves its stacks."""
WRITE_WORKER_EVERY_S = 0.5
"""A loader's process is always killed, or ends without a word."""
SWITCH_S, TIMER_SLACK_NS = 0.00001, 1000
"""Time after which the main thread gives the GIL to the sampler, and how much later Linux may wake that. By the
defaults, 5 ms and 0.05 ms, most looks would come when the main thread gives the GIL away by itself, such as in an
operation on tensors, and few in a loop of Python."""
MIN_LATE_S = 0.002
"""Delay of a look from which another thread had the GIL."""
MIN_CPU_S = 0.0002
"""CPU time of another thread since the last look from which it counts."""
MIN_SLOW_RATIO, MIN_SLOW_S = 2.5, 0.02
"""How many times as long as a typical step, and how much longer, a step must be to count as slow."""
MAX_FRAMES = 200

Stack = tuple[str, str, tuple[Place, ...]]
"""A thread's name, the phase, and the places from the outermost on."""


class Clocks:
    """The CPU time of a thread, and its time in the queue for a CPU; zero where the kernel does not count them."""

    def __init__(self, thread: threading.Thread) -> None:
        # A thread's own clock is exact, but may be asked for only while it certainly lives.
        is_main = thread is threading.main_thread() and thread.ident is not None
        self._cpu = time.pthread_getcpuclockid(thread.ident) if is_main and thread.ident else None
        self._queue: int | None = None
        self._last = 0.0, 0.0
        # In a forked process `native_id` of the main thread is the old one for a while.
        number = os.getpid() if is_main else thread.native_id
        with suppress(OSError):
            self._queue = os.open(f"/proc/self/task/{number}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        self._last = self._read()

    def since_last(self) -> tuple[float, float]:
        """Return the seconds on a CPU and in the queue since the last call."""
        now, last = self._read(), self._last
        self._last = now
        return now[0] - last[0], now[1] - last[1]

    def _read(self) -> tuple[float, float]:
        if self._queue is None:
            return (0.0, 0.0) if self._cpu is None else (time.clock_gettime(self._cpu), 0.0)
        try:
            cpu, queued = (int(word) / 1e9 for word in os.pread(self._queue, 100, 0).split()[:2])
        except OSError:  # the thread has ended
            return self._last
        return (cpu if self._cpu is None else time.clock_gettime(self._cpu)), queued

    def close(self) -> None:
        if self._queue is not None:
            os.close(self._queue)


@cache
def sampler(log: Path, rank: int) -> StackSampler:
    """Return the sampler of this process, a script's and then its Trainer's; the first call installs it."""
    made = StackSampler(log / FOLDER / f"rank-{rank}.json")
    made.install()
    return made


class StackSampler(Listener):
    """Counts the stacks of this process's main thread, and of other threads of Python that use the CPU.

    Attributes:
        phase: what the main thread is doing.
    """

    def __init__(self, file: Path, write_every_s: float = WRITE_EVERY_S) -> None:
        self._file, self._write_every_s = file, write_every_s
        self.phase = "start"
        self._elements = 0
        self._is_stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._calls, self._starts, self._is_starting = CollectiveCalls(), LoaderStarts(), False

    def _clear(self) -> None:
        """Forget what was counted."""
        self._counts: dict[Stack, StackCount] = {}
        self._step: dict[Stack, tuple[float, float]] = {}
        self._blocks, self._folded = 0, len(self._ends)
        self._calls.clear()
        self._starts = LoaderStarts()
        self._before = self._counters()

    def install(self) -> None:
        """See what happens from now on: collectives, the start of loader processes, and the stacks of these."""
        self._calls.install()
        wrap("__init__", self._start_loader, _MultiProcessingDataLoaderIter)
        wrap("start", self._start_process, BaseProcess)

    def _start_loader(self, start: Callable[..., None], loader: Any, *args: Any, **kwargs: Any) -> None:
        """Start a loader's processes, and take note that the rank waits for them until their first batch."""
        if threading.current_thread() is threading.main_thread():
            self._is_starting = True
        start(loader, *args, **kwargs)
        self._starts.times += 1
        self._starts.processes += loader._num_workers

    def _start_process(self, start: Callable[[Any], None], process: Any) -> None:
        """Start a process that samples its stacks; whether it is a fork does not matter."""
        if not self._is_stopped.is_set():
            # What is not forked is sent to the process, and so is this.
            process.run = partial(run_sampled, process, self._file)
        try:
            start(process)
        finally:
            vars(process).pop("run", None)

    def on_start(self, device: torch.device, *, on_trainer: bool) -> None:
        """Begin to sample, also after `stop`: what was counted before is forgotten."""
        self._on_trainer, self._uses_gpu = on_trainer, not accelerator.is_host(device)
        # Not in the other thread, where it would be beside steps that count.
        self._switches = SwitchReader()
        # Only the main thread appends to it, so that it never waits for the other one.
        self._ends, self._skipped = [time.perf_counter()], 0
        self._is_stopped.clear()
        self._thread = threading.Thread(target=self._sample, name="stack sampler", daemon=True)
        self._clear()
        self._thread.start()

    def on_phase(self, phase: str) -> None:
        self.phase = phase

    def on_batch(self, batch: Any, loader: object) -> None:
        self._elements += count_elements(batch)
        self._is_starting = False

    def on_step_end(self, step: Step) -> None:
        if not self._on_trainer:
            self.phase = AFTER_STEP
        self._ends.append(time.perf_counter())

    def stop(self) -> None:
        """End sampling, also of processes that are started from now on, and write the counts, if it has begun."""
        self._is_stopped.set()
        if self._thread is not None:
            self._thread.join()

    @property
    def _durations(self) -> list[float]:
        ends = self._ends[self._skipped :]
        return [after - before for before, after in zip(ends, ends[1:], strict=False)]

    def _sample(self) -> None:
        main, own = threading.main_thread(), threading.get_ident()
        assert main.ident is not None
        with suppress(OSError):
            Path(f"/proc/{threading.get_native_id()}/timerslack_ns").write_text(str(TIMER_SLACK_NS))
        main_clocks = Clocks(main)
        clocks: dict[int | None, Clocks] = {}
        last = written = time.perf_counter()
        switch_s = sys.getswitchinterval()
        while not self._is_stopped.is_set():
            pause = PERIOD_S * random.uniform(0.6, 1.4)
            time.sleep(pause)
            now = time.perf_counter()
            frames = sys._current_frames()
            wall, phase = now - last, LOADER_START if self._is_starting and self.phase == "data" else self.phase
            is_late = wall - pause > MIN_LATE_S
            last = now
            others_s = 0.0
            for thread in threading.enumerate():
                if thread.ident is None or thread.ident in (own, main.ident) or thread.ident not in frames:
                    continue
                if thread.native_id not in clocks:
                    clocks[thread.native_id] = Clocks(thread)
                cpu, queued = clocks[thread.native_id].since_last()
                if cpu > MIN_CPU_S:
                    others_s += cpu
                    self._add((thread.name, "", _places(frames[thread.ident])), wall, cpu, queued)
            # Other threads keep their turns, or what they cost could not be seen.
            sys.setswitchinterval(switch_s if others_s else SWITCH_S)
            cpu, queued = main_clocks.since_last()
            gil = min(others_s, max(wall - cpu - queued, 0.0)) if is_late else 0.0
            stack = MAIN, phase, _places(frames[main.ident])
            del frames
            self._add(stack, wall, cpu, queued, gil)
            spent, waited = self._step.get(stack, (0.0, 0.0))
            self._step[stack] = spent + wall, waited + queued
            self._switches.look()
            if not self._skipped and len(self._ends) > WARMUP_STEPS:
                self._skipped = len(self._ends) - 1
                self._clear()
            elif len(self._ends) > self._folded:
                self._fold()
            if now - written > self._write_every_s:
                self._write()
                written = time.perf_counter()
        sys.setswitchinterval(switch_s)
        self._write()
        for each in (main_clocks, *clocks.values()):
            each.close()

    def _add(self, stack: Stack, wall: float, cpu: float, queued: float, gil: float = 0.0) -> None:
        count = self._counts.setdefault(stack, StackCount(*stack[:2]))
        count.looks += 1
        count.wall_s += wall
        count.cpu_s += cpu
        count.queued_s += queued
        count.gil_s += gil

    def _fold(self) -> None:
        """Add the steps that have ended since the last look to the squares, and to the slow ones."""
        durations = self._durations
        new = durations[self._folded - len(self._ends) :]
        is_slow = max(new) > slow_from(durations)
        self._folded = len(self._ends)
        self._blocks += 1
        for stack, (wall, queued) in self._step.items():
            count = self._counts[stack]
            count.squares += wall**2
            if is_slow:
                count.slow_s += wall
                count.slow_queued_s += queued
        self._step = {}

    def _write(self) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(self._file) as file:
            file.write_bytes(msgspec.json.encode(self._record()))

    def _record(self) -> Record:
        numbers: dict[Place, int] = {}
        for (_, _, places), count in self._counts.items():
            count.frames = [numbers.setdefault(place, len(numbers)) for place in places]
        calls = self._calls.counts.copy()  # the main thread may call meanwhile
        for (_, place), call in calls.items():
            call.frame = numbers.setdefault(place, len(numbers))
        counted: Any = {name: value - self._before[name] for name, value in self._counters().items()}
        return Record(
            **counted,
            on_trainer=self._on_trainer,
            uses_gpu=self._uses_gpu,
            blocks=self._blocks,
            durations=self._durations,
            cores=cpu_ids(),
            frames=[describe_frame(*place) for place in numbers],
            stacks=list(self._counts.values()),
            calls=list(calls.values()),
            starts=self._starts,
            switches=self._switches.read(),
        )

    def _counters(self) -> dict[str, float]:
        """Return what has been counted since this process began, by the names of the record's fields."""
        own, children = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return {
            "seconds": time.perf_counter(),
            "elements": self._elements,
            "cpu_s": own.ru_utime + own.ru_stime,
            "system_s": own.ru_stime,
            "major_faults": own.ru_majflt,
            "children_s": children.ru_utime + children.ru_stime,
            "machine_s": cpu_seconds("user", "nice", "system", "irq", "softirq"),
            "queued_s": self._queued_of_others(),
        }

    def _queued_of_others(self) -> float:
        """Return the seconds that the threads of this process, but the sampler, were in the queue for a CPU.

        On a busy machine the sampler, which wants a CPU every few milliseconds, is in the queue most of the time.
        """
        total, own = 0, str(self._thread and self._thread.native_id)
        for file in Path("/proc/self/task").glob("*/schedstat"):
            with suppress(OSError, IndexError, ValueError):
                total += int(file.read_text().split()[1]) if file.parent.name != own else 0
        return total / 1e9


def run_sampled(process: BaseProcess, file: Path) -> None:
    """Run a process that a rank has started, such as a loader's, and sample its stacks until it ends.

    Args:
        process: this one.
        file: the record of the rank; that of the process is beside it.
    """
    worker = StackSampler(file.with_name(f"{file.stem}.worker-{os.getpid()}.json"), WRITE_WORKER_EVERY_S)
    worker.phase = WORKER
    worker.on_start(torch.device("cpu"), on_trainer=False)
    type(process).run(process)


def slow_from(durations: Sequence[float]) -> float:
    """Return the seconds from which a step counts as slow, by the median of steps."""
    typical = sorted(durations)[len(durations) // 2]
    return max(MIN_SLOW_RATIO * typical, typical + MIN_SLOW_S)


def _places(frame: FrameType | None) -> tuple[Place, ...]:
    """Return the places of a stack, the outermost first."""
    frames: list[Place] = []
    while frame is not None and len(frames) < MAX_FRAMES:
        frames.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return tuple(reversed(frames))


def count_elements(batch: Any) -> int:
    """Return the elements of all tensors in nested tuples, lists and mappings."""
    return sum(tensor.numel() for tensor in tensors_in(batch))
