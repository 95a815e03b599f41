"""Time the first step of a training."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from hvd_trainer.backends import StepResult
from hvd_trainer.data import Batch
from hvd_trainer.observe.callback import Observer, RunView
from hvd_trainer.utils import accelerator


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
