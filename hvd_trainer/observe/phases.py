"""Time the phases of steps.

     data      forward     backward     reduce   step
    |-------|-----------|-------------|--------|------|

`reduce` is waiting for other ranks: the part of the exchange that does not overlap with backward. `data` comes
between backward and reduce where the next batch is fetched while gradients are on their way.
"""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from hvd_trainer.utils import accelerator

PHASES = ("data", "forward", "backward", "collective", "step", "other")
"""Parts of a step; `other` is the rest, such as a save or the beginning of an epoch."""
OTHER, COLLECTIVE = PHASES.index("other"), PHASES.index("collective")


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
        event = torch.Event(self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    def seconds(self, start: Any, end: Any) -> float:
        """Return the seconds between two marks, which the device must have passed."""
        return float(start.elapsed_time(end)) / 1000 if self.lags else end - start

    def settle(self) -> None:
        """Wait until the device has done all earlier work."""
        accelerator.synchronize(self._device)


class Phases:
    """Takes the marks of some steps, one after the other."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._marks: list[tuple[str, Any]] = []  # phases, and the clock's marks at which they begin
        self._steps: list[tuple[int, int]] = []  # the marks at which they begin and end
        self._first = 0

    def begin(self) -> None:
        """Begin a step. The time since the last one belongs to none, such as that between two epochs."""
        self.enter(PHASES[OTHER])
        self._first = len(self._marks) - 1

    def enter(self, phase: str) -> None:
        """Begin another phase of the step."""
        self._marks.append((phase, self._clock.mark()))

    def end_step(self) -> None:
        """End a step, and begin the next one."""
        self.enter(self._marks[-1][0])
        last = len(self._marks) - 1
        self._steps.append((self._first, last))
        self._first = last

    def take_seconds(self) -> Any:
        """Return the seconds of each part of each step, shape (steps, parts), and forget the steps that are done.

        The clock must have settled.
        """
        table = np.zeros((len(self._steps), len(PHASES)))
        for row, (first, last) in enumerate(self._steps):
            for (phase, start), (_, end) in pairwise(self._marks[first : last + 1]):
                table[row, PHASES.index(phase) if phase in PHASES else OTHER] += self._clock.seconds(start, end)
        self._marks, self._steps, self._first = self._marks[self._first :], [], 0
        return table


def exchange_s(seconds: Any) -> Any:
    """Return each step's exchange itself, shape (steps,), from the seconds of phases, shape (ranks, steps, parts):
    the shortest `reduce`, that of the rank which came last.
    """
    return seconds[:, :, COLLECTIVE].min(axis=0)
