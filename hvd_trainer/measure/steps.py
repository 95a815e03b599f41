"""Record the steps of a rank, of any job, in LOG_DIR/steps/rank-0.npz."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hvd_trainer.observe.memory import MB, peak_bytes
from hvd_trainer.observe.phases import PARTS, Clock, Phases

FOLDER, FIRST_STEP = "steps", "first-step"
MAX_PENDING = 64
"""Steps whose marks are kept before they are converted to seconds: a GPU lags behind by fewer steps."""


@cache
def recorder(log: Path, rank: int) -> StepRecorder:
    """Return the recorder of this process, of which all trainings in it are a part."""
    return StepRecorder(log, rank)


class StepRecorder:
    """Records how long each part of each step took, with the step's samples, learning rate and loss.

    The file is NumPy's. It has an entry for each step in `seconds` (steps, parts) in the order of `parts`, `step`,
    `samples`, `lr`, `loss` (this rank's; NaN if unknown), `skipped`, `cpu_s` (CPU time of the whole process), and
    of a stage on a CPU in `busy_s`; and `began_at` and `first_step_at` (seconds since 1970), `weights` (a digest),
    and in JSON `facts` of the work and `results`.

    Args:
        log: the folder of the recordings.
        rank: of this process.
    """

    def __init__(self, log: Path, rank: int) -> None:
        self._file = log / FOLDER / f"rank-{rank}.npz"
        self._device = torch.device("cpu")
        self._clock = Clock(self._device)
        self._phases: Phases | None = None
        self._rows: list[tuple[int, float, float]] = []
        self._pending: list[tuple[Sequence[Tensor], Tensor | bool]] = []
        self._seconds: list[Any] = []
        self._results: list[tuple[float, bool]] = []
        self._busy: list[float] = []
        self._began_at, self._first_step_at = time.time(), 0.0
        self._cpu = time.process_time()

    def begin(self, device: torch.device) -> None:
        """Begin the first step that is timed, or that of a further training.

        Args:
            device: on which the rank computes.
        """
        self._device, self._clock = device, Clock(device)
        self._clock.settle()
        self._phases = Phases(self._clock)
        self._phases.begin()

    def enter(self, phase: str) -> None:
        """Begin another phase of the step, such as those of `observe.phases.PARTS`."""
        if self._phases is not None:
            self._phases.enter(phase)

    def end_step(
        self,
        *,
        samples: int,
        lr: float,
        losses: Sequence[Tensor],
        skipped: Tensor | bool = False,
        busy_s: float | None = None,
    ) -> None:
        """End a step.

        Args:
            samples: that were trained on in it.
            lr: its learning rate.
            losses: of its passes, on any device; no step waits for them.
            skipped: whether the update was left out.
            busy_s: seconds in which a stage on a CPU has computed.
        """
        assert self._phases is not None
        if not self._rows:
            self._clock.settle()
            self._first_step_at = time.time()
            self._mark_first_step()
        self._phases.end_step(len(self._rows) + 1)
        cpu = time.process_time()
        self._rows.append((samples, lr, cpu - self._cpu))
        self._cpu = cpu
        self._pending.append((losses, skipped))
        if busy_s is not None:
            self._busy.append(busy_s)
        if len(self._pending) == MAX_PENDING:
            self._resolve()

    def end_epoch(self) -> None:
        """Assign the time since the last step to no step."""
        if self._phases is not None:
            self._phases.end_epoch()

    def write(self, *, facts: Mapping[str, Any], results: Mapping[str, Any], weights: str) -> None:
        """Write all steps so far.

        Args:
            facts: of the work, in plain JSON.
            results: of the training, such as its losses, in plain JSON; the peak memory is added.
            weights: a digest of the final weights.

        Raises:
            OSError: the folder cannot be written to.
        """
        self._resolve()
        table = np.array(self._rows, [("samples", int), ("lr", float), ("cpu_s", float)])
        outcomes = np.array(self._results, [("loss", float), ("skipped", bool)])
        columns: dict[str, Any] = {name: of[name] for of in (table, outcomes) for name in of.dtype.names or ()}
        if self._busy:
            columns["busy_s"] = np.array(self._busy)
        self._file.parent.mkdir(parents=True, exist_ok=True)
        np.savez(
            self._file,
            parts=np.array(PARTS),
            seconds=np.concatenate(self._seconds),
            step=np.arange(1, len(table) + 1),
            began_at=self._began_at,
            first_step_at=self._first_step_at,
            facts=json.dumps(facts),
            results=json.dumps({"peak_memory_mb": round(peak_bytes(self._device) / MB, 2), **results}),
            weights=weights,
            **columns,
        )

    def _mark_first_step(self) -> None:
        """Leave a file whose time tells when the slowest rank has made its first step, however the run ends."""
        log = self._file.parents[1]
        log.mkdir(parents=True, exist_ok=True)
        (log / FIRST_STEP).touch()

    def _resolve(self) -> None:
        assert self._phases is not None
        self._clock.settle()
        self._seconds.append(self._phases.seconds())
        self._phases.forget()
        for losses, skipped in self._pending:
            loss = float(torch.stack(list(losses)).mean()) if losses else math.nan
            self._results.append((loss, bool(skipped)))
        self._pending.clear()
