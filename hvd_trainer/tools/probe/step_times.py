"""Record the times of a script's steps, in the format of `observe/step_timer.py`."""

from __future__ import annotations

import atexit
import hashlib
import json
import math
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from hvd_trainer.observe.memory import MB, peak_bytes
from hvd_trainer.observe.phases import PARTS, Clock, Phases
from hvd_trainer.observe.step_timer import FOLDER
from hvd_trainer.observe.trace_format import checksum
from hvd_trainer.tools.probe.script_events import ScriptListener
from hvd_trainer.utils.tensors import tensors_in

LOSSES_AT_ONCE = 100


class ScriptStepTimes(ScriptListener):
    """Records the parts and the samples of each optimizer step, and writes them when the script ends.

    The file has `seconds`, `step`, `samples` and `loss` (of this rank), `lr` and `cpu_s` of each step as that of
    `StepTimes` has; `parameters`, `peak_memory_mb`, `began_at` and `first_step_at`; `weights`, the digest of the
    final parameters of the first optimizer; `world_size`, the ranks among which the script exchanges anything; and
    `facts`: the device, threads, number of tensors, and whether it uses Horovod's API (JSON).
    """

    def __init__(self, log: Path, rank: int) -> None:
        self._file = log / FOLDER / f"rank-{rank}.npz"
        self._device = torch.device("cpu")
        self._clock = Clock(self._device)
        self._phases: Phases | None = None
        self._began_at, self._first_step_at = time.time(), 0.0
        self._rows: list[tuple[float, float, int]] = []
        self._cpu = time.process_time()
        self._parameters: list[Tensor] = []
        self._world_size, self._uses_hvd = 1, False
        self._fetched, self._samples = 0, 0
        self._loss: Tensor | None = None
        self._losses = _Losses()

    def on_start(self, optimizer: Optimizer) -> None:
        self._parameters = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        self._device = self._parameters[0].device
        self._world_size, self._uses_hvd = world_size(), _hvd() is not None
        self._clock = Clock(self._device)
        self._clock.settle()
        self._phases = Phases(self._clock)
        self._phases.begin()
        self._first_step_at = time.time()
        # Now, so that it is called before what the script's own libraries do at the end, which may fail.
        atexit.register(self._write)

    def on_phase(self, phase: str) -> None:
        if self._phases is not None:
            self._phases.enter(phase)

    def on_batch(self, batch: Any, loader: object) -> None:
        self._fetched = batch_size(batch)

    def on_backward(self, loss: Any) -> None:
        # A batch that is not trained on, such as one of an evaluation, does not count.
        self._samples += self._fetched
        self._fetched = 0
        self._loss = loss.detach() if isinstance(loss, Tensor) and loss.numel() == 1 else None

    def on_step_end(self, optimizer: Optimizer) -> None:
        assert self._phases is not None
        self._losses.append(self._loss)
        self._loss = None
        cpu = time.process_time()
        self._rows.append((float(optimizer.param_groups[0]["lr"]), cpu - self._cpu, self._samples))
        self._cpu, self._samples = cpu, 0
        self._phases.end_step(len(self._rows))

    def _write(self) -> None:
        assert self._phases is not None
        self._clock.settle()
        lr, cpu, samples = np.array(self._rows, dtype=float).reshape(-1, 3).T
        self._file.parent.mkdir(parents=True, exist_ok=True)
        np.savez(
            self._file,
            parts=np.array(PARTS),
            seconds=self._phases.seconds(),
            step=np.arange(1, len(lr) + 1),
            lr=lr,
            cpu_s=cpu,
            samples=samples.astype(int),
            loss=self._losses.values(),
            world_size=self._world_size,
            facts=json.dumps(
                {
                    "device": self._device.type,
                    "threads": torch.get_num_threads(),
                    "parameter_tensors": len(self._parameters),
                    "uses_hvd": self._uses_hvd,
                }
            ),
            parameters=sum(tensor.numel() for tensor in self._parameters),
            weights=hashlib.sha256("".join(map(checksum, self._parameters)).encode()).hexdigest(),
            peak_memory_mb=peak_bytes(self._device) / MB,
            began_at=self._began_at,
            first_step_at=self._first_step_at,
        )


class _Losses:
    """The loss of each step; those on a GPU are fetched many at once, so that no step waits for it."""

    def __init__(self) -> None:
        self._known: list[float] = []
        self._waiting: list[Tensor | float] = []

    def append(self, loss: Tensor | None) -> None:
        """Take the loss of the next step; None where it is not known."""
        self._waiting.append(math.nan if loss is None else loss)
        if len(self._waiting) == LOSSES_AT_ONCE:
            self.values()

    def values(self) -> Any:
        """Return all losses, as an array."""
        self._known += map(float, self._waiting)
        self._waiting = []
        return np.array(self._known)


def _hvd() -> ModuleType | None:
    """Return the module by which the script uses Horovod's API; None if it does not."""
    modules = map(sys.modules.get, ("horovod.torch", "hvd_trainer.hvd"))
    return next((module for module in modules if module is not None and module.is_initialized()), None)


def world_size() -> int:
    """Return among how many ranks this process exchanges anything."""
    hvd = _hvd()
    if hvd is not None:
        return int(hvd.size())
    group = torch.distributed
    return group.get_world_size() if group.is_available() and group.is_initialized() else 1


def batch_size(batch: Any) -> int:
    """Return the length of the first tensor in a batch of tuples, lists and dictionaries; 0 if it has none."""
    return next((len(tensor) for tensor in tensors_in(batch) if tensor.dim() > 0), 0)
