"""Loading an optimizer's state into the objects that it has.

`Optimizer.load_state_dict` puts other parameter groups and other state in their place. Whoever holds the old ones
(a scheduler, a wrapped optimizer, a variable with `optimizer.param_groups[0]`) would then set a learning rate that
nobody reads.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


def load_in_place(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load a `state_dict`, as the optimizer's own method does, into its groups, their dicts and their tensors.

    Settings that are not in the state stay. Tensors that the optimizer lacks become those of the state.

    Raises:
        ValueError: its groups are not those of the optimizer.
    """
    within = [value for value in vars(optimizer).values() if isinstance(value, Optimizer)]
    before = [(part, part.param_groups, part.state) for part in (optimizer, *within)]
    optimizer.load_state_dict(state)
    for part, groups, tensors in before:
        _take_over(part, groups, tensors)


def _take_over(optimizer: Optimizer, groups: list[Any], tensors: Any) -> None:
    """Put what an optimizer has loaded into the groups and the state that it had, and give it these back."""
    loaded_groups, loaded_tensors = optimizer.param_groups, optimizer.state
    for current, loaded in zip(groups, loaded_groups, strict=True):
        # The optimizer has not moved its settings, such as a learning rate on a GPU, to where they were.
        _assign(current, loaded, ("shape", "dtype", "layout"))
    if loaded_tensors is not tensors:
        _assign(tensors, loaded_tensors, ("shape", "dtype", "layout", "device"))
        for parameter in tensors.keys() - loaded_tensors.keys():
            del tensors[parameter]
        loaded_tensors.clear()
        loaded_tensors.update(tensors)
    if loaded_groups is not groups:
        # An optimizer within this one may have taken the new list.
        loaded_groups[:] = groups
    optimizer.param_groups, optimizer.state = groups, tensors


def _assign(current: MutableMapping[Any, Any], loaded: Mapping[Any, Any], alike: Sequence[str]) -> None:
    """Take over values, tensors into ours if these attributes are equal."""
    for key, value in loaded.items():
        old = current.get(key)
        if type(old) is dict and type(value) is dict:
            _assign(old, value, alike)
        elif (
            isinstance(old, Tensor)
            and type(old) is type(value)
            and all(getattr(old, name) == getattr(value, name) for name in alike)
        ):
            old.detach().copy_(value)
        else:
            current[key] = value
