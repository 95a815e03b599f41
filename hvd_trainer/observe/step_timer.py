"""Time the parts of each step: every rank measures its own steps and writes them to the log folder.

     data      forward     backward     reduce   step
    |-------|-----------|-------------|--------|------|        LOG_DIR/steps/rank-0.npz

`reduce` is waiting for other ranks: the part of the exchange that does not overlap with backward. `data` comes
between backward and reduce where the next batch is fetched while gradients are on their way.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from hvd_trainer.backends import Backend, StepResult
from hvd_trainer.data import Batch
from hvd_trainer.observe.callback import Observer, RunView
from hvd_trainer.utils import accelerator

FOLDER = "steps"
PARTS = ("data", "forward", "backward", "reduce", "step", "other")
"""Parts of a step; `other` is the rest, such as a save or the beginning of an epoch."""
OTHER = PARTS.index("other")
MAX_PENDING = 64
"""Steps whose marks are kept before they are converted to seconds: a GPU lags behind by fewer steps."""


class Clock(Protocol):
    """Takes marks, and measures the time between two of them."""

    def mark(self) -> Any: ...

    def seconds(self, start: Any, end: Any) -> float: ...

    def settle(self) -> None:
        """Wait until all earlier work is done."""


class HostClock:
    """A clock for CPUs, where a call returns when its work is done."""

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def settle(self) -> None:
        """Return: nothing is pending on a CPU."""


class DeviceClock:
    """A clock for GPUs, which lag behind the program: a mark is an event in the device's queue; nothing waits."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> Any:
        event = accelerator.event(self._device, timing=True)
        event.record(accelerator.current_stream(self._device))
        return event

    def seconds(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end)) / 1000

    def settle(self) -> None:
        accelerator.synchronize(self._device)


def clock_of(device: torch.device) -> Clock:
    """Return the clock for a device."""
    return HostClock() if accelerator.is_host(device) else DeviceClock(device)


class FirstStep(Observer):
    """Times the first step, which sets up caches and may compile, and so is no measure of speed."""

    def __init__(self, device: torch.device) -> None:
        self._clock = clock_of(device)
        self._began = 0.0
        self._seconds: float | None = None

    def on_batches(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        self._began = time.perf_counter()
        return batches

    def on_step_end(self, run: RunView, result: StepResult) -> None:
        if self._seconds is None:
            self._clock.settle()
            self._seconds = time.perf_counter() - self._began

    def figures(self) -> dict[str, float]:
        """Return this rank's seconds for the record of the run's end; empty if there was no step."""
        return {} if self._seconds is None else {"first_step_s": self._seconds}


class Pending(NamedTuple):
    """A step whose marks and figures are still on its device."""

    marks: Sequence[tuple[int, Any]]
    losses: tuple[Tensor, ...]
    grad_norm: Tensor | None
    skipped: bool | Tensor


class StepTimes(Observer):
    """Measures the steps of this rank, and writes them to a file at the end of the training.

    The file is NumPy's, with one entry per step: `seconds` (steps, parts) in the order of `parts`,
    `step`, `epoch`, `samples` (of all ranks), `lr`, `loss` (this rank's), `grad_norm`, `skipped`, `cpu_s` (CPU
    time of the whole process), and of a stage on a CPU `busy_s` (seconds in which it computed, and did not wait
    for another stage); and `began_at` and `first_step_at`, in seconds since 1970.

    Args:
        backend: the engine.
        log_dir: the log folder, on this rank's node.
    """

    needs_norm = True

    def __init__(self, backend: Backend, log_dir: str) -> None:
        self._file = Path(log_dir).expanduser() / FOLDER / f"rank-{backend.world.rank}.npz"
        self._clock = clock_of(backend.device)
        self._columns = {name: column for column, name in enumerate(PARTS)}
        self._pending: list[Pending] = []
        self._seconds: list[list[float]] = []
        self._rows: list[tuple[float, ...]] = []
        self._results: list[tuple[float, float, float]] = []
        self._marks: list[tuple[int, Any]] = []
        self._samples, self._cpu = 0, 0.0
        self._began_at, self._first_step_at = 0.0, 0.0
        self._busy: list[float] = []
        self._busy_before = 0.0

    @contextmanager
    def around_training(self, run: RunView) -> Iterator[None]:
        """Measure each step while the context is open, and write all of them on exit.

        Raises:
            OSError: the folder cannot be written to.
        """
        activity = run.backend.activity
        self._began_at, self._cpu = time.time(), time.process_time()
        self._samples = run.progress.samples
        self._marks = [(OTHER, self._clock.mark())]
        activity.listeners.append(self._enter)
        try:
            yield
        finally:
            activity.listeners.remove(self._enter)
        self._write()

    def _enter(self, phase: str) -> None:
        self._marks.append((self._columns.get(phase, OTHER), self._clock.mark()))

    def on_step_end(self, run: RunView, result: StepResult) -> None:
        if not self._rows:
            self._clock.settle()
            self._first_step_at = time.time()
        end = self._clock.mark()
        self._pending.append(
            Pending([*self._marks, (OTHER, end)], result.losses, result.grad_norm, result.skipped)
        )
        self._marks = [(self._marks[-1][0], end)]
        progress, cpu = run.progress, time.process_time()
        counts = (progress.step, progress.epoch + 1, progress.samples - self._samples)
        self._rows.append((*counts, run.rate.last, cpu - self._cpu))
        self._samples, self._cpu = progress.samples, cpu
        if (busy := run.busy_s) is not None:
            self._busy.append(busy - self._busy_before)
            self._busy_before = busy
        if len(self._pending) == MAX_PENDING:
            self._resolve()

    def on_epoch_end(self, run: RunView, record: dict[str, Any]) -> None:
        self._marks = [(OTHER, self._clock.mark())]
        self._busy_before = 0.0

    def _resolve(self) -> None:
        self._clock.settle()
        for step in self._pending:
            seconds = [0.0] * len(PARTS)
            for (column, start), (_, end) in zip(step.marks, step.marks[1:], strict=False):
                seconds[column] += self._clock.seconds(start, end)
            self._seconds.append(seconds)
            loss = float(torch.stack(step.losses).mean()) if step.losses else math.nan
            norm = math.nan if step.grad_norm is None else float(step.grad_norm)
            self._results.append((loss, norm, float(step.skipped)))
        self._pending.clear()

    def _write(self) -> None:
        self._resolve()
        step, epoch, samples, lr, cpu = np.array(self._rows, dtype=float).reshape(-1, 5).T
        loss, grad_norm, skipped = np.array(self._results).reshape(-1, 3).T
        self._file.parent.mkdir(parents=True, exist_ok=True)
        busy: dict[str, Any] = {"busy_s": np.array(self._busy)} if self._busy else {}
        np.savez(
            self._file,
            parts=np.array(PARTS),
            seconds=np.array(self._seconds).reshape(-1, len(PARTS)),
            step=step.astype(int),
            epoch=epoch.astype(int),
            samples=samples.astype(int),
            lr=lr,
            skipped=skipped.astype(bool),
            cpu_s=cpu,
            loss=loss,
            grad_norm=grad_norm,
            began_at=self._began_at,
            first_step_at=self._first_step_at,
            **busy,
        )
