"""Read off an optimizer and the modules of this process what a script trains, and among how many ranks."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from hvd_trainer.measure.trace_format import checksum
from hvd_trainer.utils import accelerator
from hvd_trainer.utils.tensors import parameters_of, tensors_in


def facts_of(optimizer: Optimizer) -> dict[str, Any]:
    """Return the facts of a script's work, by the optimizer of its first step."""
    parameters = list(parameters_of(optimizer))
    device = parameters[0].device
    return {
        "on_trainer": False,
        "world_size": _world_size(),
        "device": "cpu" if accelerator.is_host(device) else accelerator.name(device),
        "threads": torch.get_num_threads(),
        "parameters": sum(tensor.numel() for tensor in parameters),
        "uses_hvd": _hvd() is not None,
    }


def digest(tensors: Iterable[Tensor]) -> str:
    """Return the SHA-256 of tensors, in their order."""
    return hashlib.sha256("".join(map(checksum, tensors)).encode()).hexdigest()


def batch_size(batch: Any) -> int:
    """Return the length of the first tensor in a batch of tuples, lists and dictionaries; 0 if it has none."""
    return next((len(tensor) for tensor in tensors_in(batch) if tensor.dim() > 0), 0)


def _hvd() -> ModuleType | None:
    """Return the module by which the script uses Horovod's API; None if it does not."""
    modules = map(sys.modules.get, ("horovod.torch", "hvd_trainer.hvd"))
    return next((module for module in modules if module is not None and module.is_initialized()), None)


def _world_size() -> int:
    """Return among how many ranks this process exchanges anything."""
    hvd = _hvd()
    if hvd is not None:
        return int(hvd.size())
    group = torch.distributed
    return group.get_world_size() if group.is_available() and group.is_initialized() else 1
