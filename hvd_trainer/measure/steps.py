"""Record the steps of a rank, of any job, in LOG_DIR/steps/rank-0.npz."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch

from hvd_trainer.measure.listener import End, Listener, Step
from hvd_trainer.observe.memory import MB, peak_bytes
from hvd_trainer.observe.phases import PHASES, Clock, Phases
from hvd_trainer.utils.files import atomic_write

FOLDER, FIRST_STEP = "steps", "first-step"
MAX_PENDING = 64
"""Steps whose marks are kept before they are converted to seconds: a GPU lags behind by fewer steps."""


@cache
def recorder(log: Path, rank: int) -> StepRecorder:
    """Return the recorder of this process, of which all trainings in it are a part."""
    return StepRecorder(log, rank)


class StepRecorder(Listener):
    """Records how long each part of each step took, with the step's samples, learning rate and loss.

    The file is NumPy's. It has an entry for each step in `seconds` (steps, parts) in the order of `parts`, `step`,
    `samples`, `lr`, `loss` (this rank's; NaN if unknown) and `skipped`; and `first_step_at` (seconds since 1970),
    `weights` (a digest), and in JSON `facts` of the work and `results`.
    """

    def __init__(self, log: Path, rank: int) -> None:
        self._file = log / FOLDER / f"rank-{rank}.npz"
        self._device = torch.device("cpu")
        self._clock = Clock(self._device)
        self._phases: Phases | None = None
        self._pending: list[Step] = []
        self._seconds: list[Any] = []
        self._rows: list[tuple[int, float, float, bool]] = []
        self._first_step_at = 0.0

    def on_start(self, device: torch.device, *, on_trainer: bool) -> None:
        """Begin the first step that is timed, or that of a further training."""
        self._pending.clear()  # of a training that has failed
        self._device, self._clock = device, Clock(device)
        self._clock.settle()
        self._phases = Phases(self._clock)
        self._phases.begin()

    def on_phase(self, phase: str) -> None:
        if self._phases is not None:
            self._phases.enter(phase)

    def on_step_end(self, step: Step) -> None:
        assert self._phases is not None
        if not self._first_step_at:
            self._clock.settle()
            self._first_step_at = time.time()
            self._mark_first_step()
        self._pending.append(step)
        self._phases.end_step()
        if len(self._pending) == MAX_PENDING:
            self._resolve()

    def on_epoch_end(self, record: Mapping[str, Any]) -> None:
        """Assign the time since the last step to no step."""
        if self._phases is not None:
            self._phases.begin()

    def on_end(self, end: End) -> None:
        """Write all steps so far.

        Raises:
            OSError: the folder cannot be written to.
        """
        self._resolve()
        table = np.array(self._rows, [("samples", int), ("lr", float), ("loss", float), ("skipped", bool)])
        columns: dict[str, Any] = {name: table[name] for name in table.dtype.names or ()}
        self._file.parent.mkdir(parents=True, exist_ok=True)
        columns |= {
            "parts": np.array(PHASES),
            "seconds": np.concatenate(self._seconds),
            "step": np.arange(1, len(table) + 1),
            "first_step_at": self._first_step_at,
            "facts": json.dumps(end.facts),
            "results": json.dumps({"peak_memory_mb": round(peak_bytes(self._device) / MB, 2), **end.results}),
            "weights": end.weights,
        }
        # At once: a rank that is killed meanwhile leaves no half of a file.
        with atomic_write(self._file) as temporary, temporary.open("wb") as file:
            np.savez(file, **columns)

    def _mark_first_step(self) -> None:
        """Leave a file whose time tells when the slowest rank has made its first step, however the run ends."""
        log = self._file.parents[1]
        log.mkdir(parents=True, exist_ok=True)
        (log / FIRST_STEP).touch()

    def _resolve(self) -> None:
        assert self._phases is not None
        self._clock.settle()
        self._seconds.append(self._phases.take_seconds())
        for step in self._pending:
            loss = fmean(map(float, step.losses)) if step.losses else math.nan
            self._rows.append((step.samples, float(step.lr), loss, bool(step.skipped)))
        self._pending.clear()
