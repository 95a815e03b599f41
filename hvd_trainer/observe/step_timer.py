"""Time the parts of each step: every rank measures its own steps and writes them to LOG_DIR/steps/rank-0.npz."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hvd_trainer.backends import Backend, StepResult
from hvd_trainer.data import Batch
from hvd_trainer.observe.callback import Observer, RunView
from hvd_trainer.observe.phases import PARTS, Clock, Phases
from hvd_trainer.utils import accelerator

FOLDER = "steps"
MAX_PENDING = 64
"""Steps whose marks are kept before they are converted to seconds: a GPU lags behind by fewer steps."""
ROW = [("step", int), ("epoch", int), ("samples", int), ("lr", float), ("cpu_s", float)]
RESULT = [("loss", float), ("grad_norm", float), ("skipped", bool)]
"""Columns of the file that are known at the end of a step, and later from its device."""


class FirstStep(Observer):
    """Times the first step, which sets up caches and may compile, and so is no measure of speed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._began = 0.0
        self._seconds: float | None = None

    def on_batches(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        self._began = time.perf_counter()
        return batches

    def on_step_end(self, run: RunView, result: StepResult) -> None:
        if self._seconds is None:
            accelerator.synchronize(self._device)
            self._seconds = time.perf_counter() - self._began

    def figures(self) -> dict[str, float]:
        """Return this rank's seconds for the record of the run's end; empty if there was no step."""
        return {} if self._seconds is None else {"first_step_s": self._seconds}


class StepTimes(Observer):
    """Measures the steps of this rank, and writes them to a file at the end of the training.

    The file is NumPy's, with one entry per step: `seconds` (steps, parts) in the order of `parts`,
    `step`, `epoch`, `samples` (of all ranks), `lr`, `loss` (this rank's), `grad_norm`, `skipped`, `cpu_s` (CPU
    time of the whole process), and of a stage on a CPU `busy_s` (seconds in which it computed, and did not wait
    for another stage); and `began_at` and `first_step_at`, in seconds since 1970.

    Args:
        log_dir: the log folder, on this rank's node.
    """

    needs_norm = True

    def __init__(self, backend: Backend, log_dir: str) -> None:
        self._file = Path(log_dir).expanduser() / FOLDER / f"rank-{backend.world.rank}.npz"
        self._clock = Clock(backend.device)
        self._phases = Phases(self._clock)
        self._pending: list[StepResult] = []
        self._seconds: list[Any] = []
        self._rows: list[tuple[float, ...]] = []
        self._results: list[tuple[float, float, bool]] = []
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
        self._phases.begin()
        activity.listeners.append(self._phases.enter)
        try:
            yield
        finally:
            activity.listeners.remove(self._phases.enter)
        self._write()

    def on_step_end(self, run: RunView, result: StepResult) -> None:
        if not self._rows:
            self._clock.settle()
            self._first_step_at = time.time()
        self._phases.end_step(run.progress.step)
        self._pending.append(result)
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
        self._phases.end_epoch()
        self._busy_before = 0.0

    def _resolve(self) -> None:
        self._clock.settle()
        self._seconds.append(self._phases.seconds())
        self._phases.forget()
        for step in self._pending:
            loss = float(torch.stack(step.losses).mean()) if step.losses else math.nan
            norm = math.nan if step.grad_norm is None else float(step.grad_norm)
            self._results.append((loss, norm, bool(step.skipped)))
        self._pending.clear()

    def _write(self) -> None:
        self._resolve()
        tables = np.array(self._rows, ROW), np.array(self._results, RESULT)
        columns: dict[str, Any] = {name: table[name] for table in tables for name in table.dtype.names or ()}
        if self._busy:
            columns["busy_s"] = np.array(self._busy)
        self._file.parent.mkdir(parents=True, exist_ok=True)
        np.savez(
            self._file,
            parts=np.array(PARTS),
            seconds=np.concatenate(self._seconds),
            began_at=self._began_at,
            first_step_at=self._first_step_at,
            **columns,
        )
