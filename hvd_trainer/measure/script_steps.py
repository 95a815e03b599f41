"""Tell the recorder of steps what a script does that is not built on the Trainer."""

from __future__ import annotations

import atexit
import hashlib
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from hvd_trainer.measure.events import ScriptListener
from hvd_trainer.measure.steps import recorder
from hvd_trainer.measure.trace_format import checksum
from hvd_trainer.utils import accelerator
from hvd_trainer.utils.tensors import parameters_of, tensors_in


class ScriptSteps(ScriptListener):
    """Records each optimizer step, and writes all of them when the script ends."""

    def __init__(self, log: Path, rank: int) -> None:
        self._recorder = recorder(log, rank)
        self._parameters: list[Tensor] = []
        self._facts: dict[str, Any] = {}
        self._fetched, self._samples = 0, 0
        self._loss: Tensor | None = None
        self._sees_exchange = False

    def on_start(self, optimizer: Optimizer) -> None:
        self._parameters = list(parameters_of(optimizer))
        device = self._parameters[0].device
        self._facts = {
            "on_trainer": False,
            "world_size": world_size(),
            "device": "cpu" if accelerator.is_host(device) else accelerator.name(device),
            "threads": torch.get_num_threads(),
            "parameters": sum(tensor.numel() for tensor in self._parameters),
            "uses_hvd": _hvd() is not None,
        }
        self._recorder.begin(device)
        # Now, so that it is called before what the script's own libraries do at the end, which may fail.
        atexit.register(self._write)

    def stop(self) -> None:
        atexit.unregister(self._write)

    def on_phase(self, phase: str) -> None:
        self._sees_exchange |= phase == "reduce"
        self._recorder.enter(phase)

    def on_batch(self, batch: Any, loader: object) -> None:
        self._fetched = batch_size(batch)

    def on_backward(self, loss: Any) -> None:
        # A batch that is not trained on, such as one of an evaluation, does not count.
        self._samples += self._fetched
        self._fetched = 0
        self._loss = loss.detach() if isinstance(loss, Tensor) and loss.numel() == 1 else None

    def on_step_end(self, optimizer: Optimizer) -> None:
        losses = () if self._loss is None else (self._loss,)
        self._recorder.end_step(samples=self._samples, lr=float(optimizer.param_groups[0]["lr"]), losses=losses)
        self._loss, self._samples = None, 0

    def _write(self) -> None:
        # DistributedDataParallel waits within the backward pass.
        facts = self._facts | {"sees_exchange": self._sees_exchange}
        self._recorder.write(facts=facts, results={}, weights=digest(self._parameters))


def digest(tensors: Iterable[Tensor]) -> str:
    """Return the SHA-256 of tensors, in their order."""
    return hashlib.sha256("".join(map(checksum, tensors)).encode()).hexdigest()


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
