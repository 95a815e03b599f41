"""When each phase of each profiled step began: as rows of a trace, and as seconds."""

from __future__ import annotations

import time
from bisect import bisect_right
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from hvd_trainer.backends.base import Span
from hvd_trainer.observe.step_timer import OTHER, PARTS, DeviceClock, clock_of

HOST_ROW, DEVICE_ROW = "steps", "steps, as the GPU does them"


class Mark(NamedTuple):
    """A phase begins."""

    phase: str
    host_ns: int
    """since 1970"""
    mark: Any
    """of the clock by which seconds are counted"""


class Phases:
    """Takes the marks of some steps, one after the other.

    Args:
        device: where the rank computes. A GPU is behind the program, so that its steps are timed by themselves.
    """

    def __init__(self, device: torch.device) -> None:
        self.clock = clock_of(device)
        self._marks: list[Mark] = []
        self._steps: list[tuple[int, int, int]] = []  # its number, and the marks at which it begins and ends
        self._first = 0

    def begin(self) -> None:
        """Begin the first step."""
        self.clock.settle()
        self.enter(PARTS[OTHER])

    def enter(self, phase: str) -> None:
        """Begin another phase of the step."""
        self._marks.append(Mark(phase, time.time_ns(), self.clock.mark()))

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
        """Of the steps that are done."""
        return [number for number, _, _ in self._steps]

    @property
    def window(self) -> tuple[int, int]:
        """When `begin` was called, and the last of them ended, in nanoseconds since 1970."""
        return self._marks[0].host_ns, self._marks[self._steps[-1][2]].host_ns

    def in_step(self, at_ns: float) -> bool:
        """Return whether a moment of the host's clock lies within a step, and not between two steps."""
        number = bisect_right(self._begins_ns, at_ns) - 1
        return number >= 0 and at_ns < self._marks[self._steps[number][2]].host_ns

    @cached_property
    def _begins_ns(self) -> list[int]:
        return [self._marks[first].host_ns for _, first, _ in self._steps]

    def seconds(self) -> Any:
        """Return the seconds of each phase of each step, shape (steps, parts). The clock must have settled."""
        table = np.zeros((len(self._steps), len(PARTS)))
        for row, (_, first, last) in enumerate(self._steps):
            for before, after in zip(self._marks[first:last], self._marks[first + 1 : last + 1], strict=True):
                column = PARTS.index(before.phase) if before.phase in PARTS else OTHER
                table[row, column] += self.clock.seconds(before.mark, after.mark)
        return table

    def spans(self) -> list[Span]:
        """Return the steps, and the phases in them and between them, as rows of a trace."""
        found = self._row(HOST_ROW, [mark.host_ns for mark in self._marks])
        if isinstance(self.clock, DeviceClock):
            start = self._marks[0]  # when the GPU had nothing to do, so that both were at the same point
            since = [self.clock.seconds(start.mark, mark.mark) for mark in self._marks]
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
