"""Measure the phases of each step on every rank, and keep them in the log folder.

     data      forward     backward     reduce   step
    |-------|-----------|-------------|--------|------|        LOG_DIR/steps/rank-0.npz

`reduce` is waiting for other ranks: the part of the exchange that backward has not hidden. `data` may come between
backward and it, where the next batch is fetched while gradients are on their way.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from hvd_trainer.backends import StepResult
from hvd_trainer.observe.callback import Observer
from hvd_trainer.utils import accelerator

if TYPE_CHECKING:
    from hvd_trainer.data import Batch
    from hvd_trainer.training.trainer import Trainer

FOLDER = "steps"
PARTS = ("data", "forward", "backward", "reduce", "step", "other")
"""Of a step; `other` is all that is none of them, such as a save or the beginning of an epoch."""
OTHER = PARTS.index("other")
PENDING = 64
"""Steps whose marks are kept before they are made into seconds: a GPU is that far behind at most."""


class Clock(Protocol):
    """Take marks, and return the time between two of them."""

    def mark(self) -> Any: ...

    def seconds(self, start: Any, end: Any) -> float: ...

    def settle(self) -> None:
        """Wait until all work before now is done."""


class HostClock:
    """Mark times on the CPU, where a call returns when its work is done."""

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def settle(self) -> None:
        """Do nothing: all work is done."""


class DeviceClock:
    """Mark times on an accelerator by events in its stream, which run behind the host and make nothing wait."""

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
    """Measure the first step, which includes set-up and compilation, apart from the others."""

    def __init__(self, device: torch.device) -> None:
        self._clock = clock_of(device)
        self._seconds: float | None = None

    def seen(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        self._began = time.perf_counter()
        return batches

    def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
        if self._seconds is None:
            self._clock.settle()
            self._seconds = time.perf_counter() - self._began

    def figures(self) -> dict[str, float]:
        """Return the seconds of this rank's first step for the run's last record; empty if there was no step."""
        return {} if self._seconds is None else {"first_step_s": self._seconds}


class Pending(NamedTuple):
    """A step whose figures have not been read from its device yet."""

    marks: Sequence[tuple[int, Any]]
    losses: tuple[Tensor, ...]
    grad_norm: Tensor | None
    skipped: bool | Tensor


class StepTimes(Observer):
    """Measure the steps of this rank, and write them to the log folder at the end of the training.

    What it keeps, as a file of NumPy with one entry per step: `seconds` (steps, parts) in the order of `parts`,
    `step`, `epoch`, `samples` (of all ranks), `lr`, `loss` (this rank's), `grad_norm`, `skipped`, `cpu_s` (CPU
    time of the whole process); and `began_at` and `first_step_at`, in seconds since 1970.

    Args:
        trainer: whose training it is.
        log_dir: the log folder, on this rank's node.
    """

    needs_norm = True

    def __init__(self, trainer: Trainer, log_dir: str) -> None:
        self._trainer = trainer
        self._file = Path(log_dir).expanduser() / FOLDER / f"rank-{trainer.world.rank}.npz"
        self._clock = clock_of(trainer.device)
        self._columns = {name: column for column, name in enumerate(PARTS)}
        self._pending: list[Pending] = []
        self._seconds: list[list[float]] = []
        self._rows: list[tuple[float, ...]] = []
        self._results: list[tuple[float, float, float]] = []
        self._first_step_at = 0.0

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Inside, each step is measured; after it, all are written down.

        Raises:
            OSError: the folder cannot be written to.
        """
        activity = self._trainer.backend.activity
        self._began_at, self._cpu = time.time(), time.process_time()
        self._samples = self._trainer.progress.samples
        self._marks = [(OTHER, self._clock.mark())]
        activity.listeners.append(self._enter)
        try:
            yield
        finally:
            activity.listeners.remove(self._enter)
        self._write()

    def _enter(self, phase: str) -> None:
        self._marks.append((self._columns.get(phase, OTHER), self._clock.mark()))

    def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
        if not self._rows:
            self._clock.settle()
            self._first_step_at = time.time()
        end = self._clock.mark()
        self._pending.append(
            Pending([*self._marks, (OTHER, end)], result.losses, result.grad_norm, result.skipped)
        )
        self._marks = [(self._marks[-1][0], end)]
        progress, cpu = trainer.progress, time.process_time()
        counts = (progress.step, progress.epoch + 1, progress.samples - self._samples)
        self._rows.append((*counts, trainer.rate.last, cpu - self._cpu))
        self._samples, self._cpu = progress.samples, cpu
        if len(self._pending) == PENDING:
            self._resolve()

    def on_epoch_end(self, trainer: Trainer, record: dict[str, Any]) -> None:
        self._marks = [(OTHER, self._clock.mark())]

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
        )
