"""Loading an optimizer's state into the objects that it has.

`Optimizer.load_state_dict` puts other parameter groups and other state in their place. Whoever holds the old ones
(a scheduler, a wrapped optimizer, a variable with `optimizer.param_groups[0]`) would then set a learning rate that
nobody reads.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


def load_in_place(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load a `state_dict`, as the optimizer's own method does, into its groups, their dicts and their tensors.

    Settings that are not in the state stay. Tensors that the optimizer lacks become those of the state.

    Raises:
        ValueError: its groups are not those of the optimizer.
    """
    groups, tensors = optimizer.param_groups, optimizer.state
    optimizer.load_state_dict(state)
    for ours, loaded in zip(groups, optimizer.param_groups, strict=True):
        _assign(ours, loaded)
    if optimizer.state is not tensors:
        _assign(tensors, optimizer.state)
        for parameter in tensors.keys() - optimizer.state.keys():
            del tensors[parameter]
    optimizer.param_groups, optimizer.state = groups, tensors


def _assign(ours: MutableMapping[Any, Any], loaded: Mapping[Any, Any]) -> None:
    for key, value in loaded.items():
        old = ours.get(key)
        if type(old) is dict and type(value) is dict:
            _assign(old, value)
        elif isinstance(old, Tensor) and type(old) is type(value) and _are_alike(old, value):
            old.detach().copy_(value)
        else:
            ours[key] = value


def _are_alike(one: Tensor, other: Tensor) -> bool:
    return all(getattr(one, name) == getattr(other, name) for name in ("shape", "dtype", "device", "layout"))
