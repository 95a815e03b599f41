"""Time the phases of steps: as seconds, and as rows of a trace.

     data      forward     backward     reduce   step
    |-------|-----------|-------------|--------|------|

`reduce` is waiting for other ranks: the part of the exchange that does not overlap with backward. `data` comes
between backward and reduce where the next batch is fetched while gradients are on their way.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from hvd_trainer.backends.base import Span
from hvd_trainer.utils import accelerator

PARTS = ("data", "forward", "backward", "reduce", "step", "other")
"""Parts of a step; `other` is the rest, such as a save or the beginning of an epoch."""
OTHER = PARTS.index("other")
HOST_ROW, DEVICE_ROW = "steps", "steps, as the GPU does them"


class Clock:
    """Takes marks, and measures the time between two of them.

    On a CPU a call returns when its work is done. A GPU lags behind the program: there a mark is an event in the
    device's queue, for which nothing waits.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.lags = not accelerator.is_host(device)

    def mark(self) -> Any:
        """Return a mark of this moment, or of that at which the device comes to what is queued next."""
        if not self.lags:
            return time.perf_counter()
        event = accelerator.event(self._device, timing=True)
        event.record(accelerator.current_stream(self._device))
        return event

    def seconds(self, start: Any, end: Any) -> float:
        """Return the seconds between two marks, which the device must have passed."""
        return float(start.elapsed_time(end)) / 1000 if self.lags else end - start

    def settle(self) -> None:
        """Wait until the device has done all earlier work."""
        accelerator.synchronize(self._device)


class Mark(NamedTuple):
    """The beginning of a phase."""

    phase: str
    host_ns: int
    """since 1970"""
    mark: Any
    """of the clock by which seconds are counted"""


class Phases:
    """Takes the marks of some steps, one after the other."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._marks: list[Mark] = []
        self._steps: list[tuple[int, int, int]] = []  # its number, and the marks at which it begins and ends
        self._first = 0

    def begin(self) -> None:
        """Begin the first step."""
        self.enter(PARTS[OTHER])

    def enter(self, phase: str) -> None:
        """Begin another phase of the step."""
        self._marks.append(Mark(phase, time.time_ns(), self._clock.mark()))

    def end_step(self, number: int) -> None:
        """End a step, and begin the next one."""
        self.enter(self._marks[-1].phase)
        last = len(self._marks) - 1
        self._steps.append((number, self._first, last))
        self._first = last

    def end_epoch(self) -> None:
        """Assign the time since the last step to no step."""
        self.enter(PARTS[OTHER])
        self._first = len(self._marks) - 1

    @property
    def numbers(self) -> list[int]:
        """Numbers of the steps that are done."""
        return [number for number, _, _ in self._steps]

    @property
    def window(self) -> tuple[int, int]:
        """Begin of the first and end of the last step, in nanoseconds since 1970."""
        return self._marks[0].host_ns, self._marks[self._steps[-1][2]].host_ns

    def in_step(self, at_ns: float) -> bool:
        """Return whether a moment of the host's clock lies within a step, and not between two steps."""
        number = bisect_right(self._begins_ns, at_ns) - 1
        return number >= 0 and at_ns < self._marks[self._steps[number][2]].host_ns

    @cached_property
    def _begins_ns(self) -> list[int]:
        return [self._marks[first].host_ns for _, first, _ in self._steps]

    def seconds(self) -> Any:
        """Return the seconds of each part of each step, shape (steps, parts). The clock must have settled."""
        table = np.zeros((len(self._steps), len(PARTS)))
        for row, (_, first, last) in enumerate(self._steps):
            for before, after in zip(self._marks[first:last], self._marks[first + 1 : last + 1], strict=True):
                column = PARTS.index(before.phase) if before.phase in PARTS else OTHER
                table[row, column] += self._clock.seconds(before.mark, after.mark)
        return table

    def forget(self) -> None:
        """Forget the steps that are done; the running one goes on."""
        self._marks, self._steps, self._first = self._marks[self._first :], [], 0

    def spans(self) -> list[Span]:
        """Return the steps, and the phases in them and between them, as rows of a trace."""
        found = self._row(HOST_ROW, [mark.host_ns for mark in self._marks])
        if self._clock.lags:
            start = self._marks[0]  # when the GPU had nothing to do, so that both were at the same point
            since = [self._clock.seconds(start.mark, mark.mark) for mark in self._marks]
            found += self._row(DEVICE_ROW, [start.host_ns + round(1e9 * seconds) for seconds in since])
        return found

    def _row(self, row: str, times_ns: list[int]) -> list[Span]:
        end = self._steps[-1][2]
        steps = [Span(row, f"step {number}", times_ns[i], times_ns[j]) for number, i, j in self._steps]
        phases = [
            Span(row, mark.phase, began, ended)
            for mark, began, ended in zip(self._marks[:end], times_ns, times_ns[1:], strict=False)
            if ended > began
        ]
        return steps + phases
