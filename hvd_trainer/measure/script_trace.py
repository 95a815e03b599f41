"""Trace the first steps of a script, in the format of `trace_format.py`."""

from __future__ import annotations

import gc
import random
import re
import weakref
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer

from hvd_trainer.measure.listener import Listener, Step
from hvd_trainer.measure.script_facts import facts_of
from hvd_trainer.measure.trace_format import ModelParts, TraceWriter, sample_checksums
from hvd_trainer.utils.tensors import parameters_of

WRAPPERS = re.compile(r"^((module|_forward_module|_original_module|_orig_mod)\.)+")
"""Prefixes that DDP, Fabric and torch.compile add to the names of parameters."""


class ScriptTrace(Listener):
    """Writes what this rank computes in the first optimizer steps of a script; rank 0 writes run.json as well."""

    def __init__(self, log: Path, rank: int, size: int, steps: int) -> None:
        self._size, self._steps = size, steps
        self._writer = TraceWriter(log, rank, size, steps)
        self._models: list[tuple[str, nn.Module]] = []
        self._at_start: dict[str, dict[str, Tensor]] = {}
        self._loader: weakref.ref[object] | None = None
        self._fetched: deque[list[str]] = deque()
        self._used: list[list[str]] = []
        self._losses: list[float] = []
        self._step = 0

    def on_batch(self, batch: Any, loader: object) -> None:
        if self._step == self._steps:
            return
        if self._loader is None or self._loader() is not loader:
            # What another loader has left was not trained on: it was that of an evaluation.
            self._loader = weakref.ref(loader)
            self._fetched.clear()
        pair = batch if isinstance(batch, tuple | list) and len(batch) == 2 else (batch, None)
        self._fetched.append(sample_checksums((pair[0], pair[1])))

    def on_backward(self, loss: Any) -> None:
        if self._fetched:  # the oldest: Accelerate fetches a batch ahead
            self._used.append(self._fetched.popleft())
        if isinstance(loss, Tensor) and loss.numel() == 1:
            self._losses.append(float(loss.detach()))

    def before_step(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        if self._step == 0:
            self._models = _models_of(optimizer)
            # Not the buffers, which the forward pass before has changed.
            state = self._parts(optimizer).state(optimizer)
            self._at_start = {kind: values for kind, values in state.items() if kind != "buffers"}

    def on_step_end(self, step: Step) -> None:
        if self._step == self._steps:
            return
        optimizer = self._optimizer
        parts = self._parts(optimizer)
        if self._step == 0:
            self._begin(parts, optimizer)
        self._step += 1
        # The update has left the gradients as they are. Before, those of a closure were not there yet.
        gradients = parts.gradients()
        norms = [torch.linalg.vector_norm(gradient) for gradient in gradients.values()]
        figures = {
            "samples": [sample for batch in self._used for sample in batch],
            "counts": [len(batch) for batch in self._used],
            "losses": self._losses,
            "lr": [float(group["lr"]) for group in optimizer.param_groups],
            "grad_norm": float(torch.linalg.vector_norm(torch.stack(norms))) if norms else None,
            "skipped": False,
        }
        self._writer.write("step", self._step, figures, gradients=gradients, **parts.state(optimizer))
        self._used, self._losses = [], []

    def _begin(self, parts: ModelParts, optimizer: Optimizer) -> None:
        facts = facts_of(optimizer) | {
            "world_size": self._size,  # of the launcher, as many as there are traces
            "parameters": sum(tensor.numel() for tensor in parts.parameters.values()),
            "optimizer": type(optimizer).__name__,
            "exchanged_by": self._exchanged_by(optimizer),
        }
        self._writer.begin(0, parts, optimizer, self._at_start, facts)

    def _exchanged_by(self, optimizer: Optimizer) -> str | None:
        """Return what averages the gradients; None if it is neither of the usual ones."""
        if hasattr(optimizer, "skip_synchronize"):
            return "hvd.DistributedOptimizer"
        modules = (module for _, model in self._models for module in model.modules())
        wrapped = any(isinstance(module, DistributedDataParallel) for module in modules)
        return DistributedDataParallel.__name__ if wrapped else None

    def _parts(self, optimizer: Optimizer) -> ModelParts:
        """Return all models' parts; parameters that are in none are called by their number in the optimizer."""
        parameters: dict[str, Tensor] = {}
        buffers: dict[str, Tensor] = {}
        modules: dict[str, nn.Module] = {}
        for prefix, model in self._models:
            parts = ModelParts.of(model)
            parameters |= _renamed(parts.parameters, prefix)
            buffers |= _renamed(parts.buffers, prefix)
            modules |= _renamed(parts.modules, prefix)
        named = set(parameters.values())
        rest = {f"parameter {n}": p for n, p in enumerate(parameters_of(optimizer)) if p not in named}
        return ModelParts({**parameters, **rest}, buffers, modules)


def seed_by_rank(rank: int) -> None:
    """Seed the generators for a script that does not: alike on all engines, and otherwise on each rank."""
    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(rank)


def _renamed(named: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {prefix + WRAPPERS.sub("", name): value for name, value in named.items()}


def _models_of(optimizer: Optimizer) -> list[tuple[str, nn.Module]]:
    """Return the outermost modules that hold parameters of an optimizer, each with a prefix for their names.

    They are found among all objects of this process: a script need not tell anyone which its model is.
    """
    place = {parameter: n for n, parameter in enumerate(parameters_of(optimizer))}
    # Not by isinstance, for which some proxies among all objects compute their class, and warn.
    modules = [module for module in gc.get_objects() if issubclass(type(module), nn.Module)]
    inner = {child for module in modules for child in module.children()}
    places = {
        module: [place[p] for p in module.parameters() if p in place] for module in modules if module not in inner
    }
    ordered = sorted((module for module in places if places[module]), key=lambda module: min(places[module]))
    names = Counter(type(module).__name__ for module in ordered)
    return [(_prefix(module, ordered, names), module) for module in ordered]


def _prefix(module: nn.Module, ordered: Sequence[nn.Module], names: Mapping[str, int]) -> str:
    """Return what tells names of several models apart, such as `Generator.`; nothing for one model."""
    name = type(module).__name__
    same = [other for other in ordered if type(other).__name__ == name]
    number = f" {same.index(module) + 1}" if names[name] > 1 else ""
    return f"{name}{number}." if len(ordered) > 1 else ""
