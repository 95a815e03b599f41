"""Read off an optimizer and the modules of this process what a script trains, and among how many ranks."""

from __future__ import annotations

import gc
import hashlib
import re
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer

from hvd_trainer.measure.trace_format import Models, checksum
from hvd_trainer.utils import accelerator
from hvd_trainer.utils.tensors import parameters_of, tensors_in

WRAPPERS = re.compile(r"^((module|_forward_module|_original_module|_orig_mod)\.)+")
"""Prefixes that DDP, Fabric and torch.compile add to the names of parameters."""


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


def exchanged_by(optimizer: Optimizer, modules: Iterable[nn.Module]) -> str | None:
    """Return what averages the gradients of these modules; None if it is neither of the usual ones."""
    if hasattr(optimizer, "skip_synchronize"):
        return "hvd.DistributedOptimizer"
    wrapped = any(isinstance(module, DistributedDataParallel) for module in modules)
    return DistributedDataParallel.__name__ if wrapped else None


def objects_of(*kinds: type) -> Iterator[Any]:
    """Return the instances of classes among all objects of this process: a script tells nobody of its models."""
    # Not by isinstance, for which some proxies among all objects compute their class, and warn.
    return (one for one in gc.get_objects() if issubclass(type(one), kinds))


def models_of(optimizer: Optimizer) -> Models:
    """Return the outermost modules that hold parameters of an optimizer.

    Of several models the names begin with what tells them apart, such as `Generator.`.
    """
    order = {parameter: place for place, parameter in enumerate(parameters_of(optimizer))}
    modules = list(objects_of(nn.Module))
    inner = {child for module in modules for child in module.children()}
    places = {m: [order[p] for p in m.parameters() if p in order] for m in modules if m not in inner}
    models = sorted((model for model in places if places[model]), key=lambda model: min(places[model]))
    of_kind: dict[str, list[nn.Module]] = {}
    for model in models:
        of_kind.setdefault(type(model).__name__, []).append(model)

    def prefix(model: nn.Module) -> str:
        name, same = type(model).__name__, of_kind[type(model).__name__]
        number = f" {same.index(model) + 1}" if len(same) > 1 else ""
        return f"{name}{number}." if len(models) > 1 else ""

    return [(model, partial(_renamed, prefix(model))) for model in models]


def _renamed(prefix: str, name: str) -> str:
    return prefix + WRAPPERS.sub("", name)


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
