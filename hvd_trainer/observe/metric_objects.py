"""Merge metric objects (torchmetrics') over ranks: gather the states of all ranks, then compute once.

torchmetrics could do it itself, but only over torch.distributed; here it is the same on either engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from hvd_trainer.backends import Backend
from hvd_trainer.errors import OptionError


@runtime_checkable
class MetricObject(Protocol):
    """The interface of a metric object; torchmetrics' metrics have it.

    One of another kind also needs `merge_state(other)`, which adds what another rank's object has gathered, and
    gathers it in numbers, tensors and the like.
    """

    def update(self, outputs: Any, targets: Any) -> None: ...

    def compute(self) -> Any: ...

    def reset(self) -> None: ...


def reset(metric: MetricObject, device: torch.device) -> None:
    """Reset a metric for a new pass, and move it to the device of the outputs."""
    if hasattr(metric, "to"):
        metric.to(device)
    for part in _parts(metric):
        # The ranks are brought together here, on either engine. Under DDP, torchmetrics would do it once more
        # and count all twice; setting `sync_on_compute` on an object that exists does not stop it.
        part.distributed_available_fn = _never
    metric.reset()


def _never() -> bool:
    return False


def export_state(metric: Any) -> Any:
    """Return one rank's state as plain values and tensors for a checkpoint; None if the metric has no state_dict.

    An object of another kind than torchmetrics' tells it by `state_dict` and `load_state_dict`.
    """
    if parts := _parts(metric):
        # Per part a list over ranks, of one as yet.
        return [[(part.update_count, _on(torch.device("cpu"), part.metric_state))] for part in parts]
    return _on(torch.device("cpu"), metric.state_dict()) if hasattr(metric, "state_dict") else None


def merge_state(states: Sequence[Any]) -> Any:
    """Merge the `export_state` of several ranks into that of one rank; None where that is impossible."""
    if all(isinstance(state, list) for state in states):
        return [[entry for rank in part for entry in rank] for part in zip(*states, strict=True)]
    return states[0] if len(states) == 1 else None


def import_state(metric: Any, state: Any, device: torch.device) -> bool:
    """Load what `export_state` returned for the same kind of metric; return whether that was possible."""
    parts = _parts(metric)
    if state is None or (parts and len(parts) != len(state)):
        return False
    if parts:
        for part, everyone in zip(parts, state, strict=True):
            _load(part, everyone, device)
    else:
        metric.load_state_dict(state)
    return True


def compute_over_ranks(metrics: Mapping[str, MetricObject], backend: Backend) -> dict[str, float]:
    """Return each metric over all samples of all ranks, equal on all ranks. A collective, unless there are none.

    Raises:
        OptionError: a metric's value is not one number, or it cannot be merged.
    """
    if not metrics:
        return {}
    exported = {name: _export(metric) for name, metric in metrics.items()}
    gathered = backend.collectives.all_gather_object(exported)
    values = {}
    for name, metric in metrics.items():
        everyone = [rank[name] for rank in gathered]
        if _parts(metric):
            import_state(metric, merge_state(everyone), backend.device)
            values[name] = _number(name, metric.compute())
        else:
            first, *others = [_with_attributes(type(metric), attributes) for attributes in everyone]
            for other in others:
                first.merge_state(other)
            values[name] = _number(name, first.compute())
    return values


def _parts(metric: Any) -> list[Any]:
    """Return the torchmetrics objects with states in a metric, wrappers' inner ones included; else an empty
    list.
    """
    modules = metric.modules() if isinstance(metric, torch.nn.Module) else ()
    return [module for module in modules if hasattr(module, "_reductions")]


def _export(metric: Any) -> Any:
    """Return what to send to the other ranks: of an object of another kind than torchmetrics' its attributes."""
    if _parts(metric):
        return export_state(metric)
    if not hasattr(metric, "merge_state"):
        raise OptionError(
            f"The metric {type(metric).__name__} is neither torchmetrics' nor has a merge_state(other): what the "
            f"ranks gathered cannot be brought together."
        )
    # Containers and tensors of its own: `merge_state` may change them, and all ranks compute on the same device.
    return tree_map_only(Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), dict(vars(metric)))


def _with_attributes(kind: type[Any], attributes: Mapping[str, Any]) -> Any:
    """Return an object of the metric's own class with what another rank has gathered."""
    metric: Any = object.__new__(kind)
    vars(metric).update(attributes)
    return metric


def _load(part: Any, everyone: Sequence[tuple[int, Mapping[str, Any]]], device: torch.device) -> None:
    """Load the states of all ranks into one torchmetrics object, by each state's own reduction.

    `Metric.merge_state` would refuse many metrics (all with `full_state_update` unset) and weighs by updates.
    Ranks that saw no sample are left out.
    """
    seen = [states for count, states in everyone if count] or [everyone[0][1]]
    # Otherwise the object would warn where rank 0 itself saw no sample, or give a value computed before.
    part._update_count = sum(count for count, _ in everyone)
    part._computed = None
    for name, reduce in part._reductions.items():
        values = [states[name] for states in seen]
        merged: Any
        if isinstance(values[0], list):
            merged = [tensor for value in values for tensor in value]
        elif len(values) == 1:
            merged = values[0]
        else:
            stacked = torch.stack(values)
            merged = stacked if reduce is None else reduce(stacked)
        setattr(part, name, _on(device, merged))


def _on(device: torch.device, value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _on(device, item) for key, item in value.items()}
    return [_on(device, item) for item in value] if isinstance(value, list) else value


def _number(name: str, value: Any) -> float:
    if isinstance(value, Tensor) and value.numel() == 1 or isinstance(value, int | float):
        return float(value)
    seen = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    raise OptionError(
        f"The metric {name!r} gives {seen}, but a record has one number per name. Give one metric per number, "
        f"such as an average over classes."
    )
