"""Access to the tensors of batches, models and optimizers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only


def tensors_in(batch: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested tuples, lists and mappings."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, list | tuple | Mapping):
        for value in batch.values() if isinstance(batch, Mapping) else batch:
            yield from tensors_in(value)


def detached(value: Any) -> Any:
    """Return nested values with each tensor detached from its graph."""
    # PyTorch's walk takes 7 us in each step, and makes cycles of objects: one tensor goes without.
    return value.detach() if isinstance(value, Tensor) else tree_map_only(Tensor, Tensor.detach, value)


def parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield all parameters that the optimizer updates, in its order."""
    for group in optimizer.param_groups:
        yield from group["params"]


def without_extra_state(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return a module's state without what its `get_extra_state` methods gave, which may be anything."""
    return {name: value for name, value in state.items() if name.rpartition(".")[2] != "_extra_state"}


def state_on_this_stage(model: nn.Module) -> dict[str, Any]:
    """Return a module's state without that of blocks on other stages, whose tensors have no contents here."""
    state = model.state_dict()
    elsewhere = {name.partition(".")[0] for name, value in without_extra_state(state).items() if value.is_meta}
    return {name: value for name, value in state.items() if name.partition(".")[0] not in elsewhere}


def local_rows(tensor: Tensor) -> tuple[Tensor, int]:
    """Return this rank's rows of a tensor and the number of the first; of one that is not sharded, all."""
    if not hasattr(tensor, "to_local"):  # to ask for the type would import DTensor, which takes half a second
        return tensor, 0
    mesh: Any = getattr(tensor, "device_mesh")  # noqa: B009
    return tensor.to_local(), mesh.get_local_rank() * -(-len(tensor) // mesh.size())


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a flat view of a contiguous tensor as uint8."""
    flat = tensor.view(-1)
    if len(flat) == 1:
        flat = flat.as_strided((1,), (1,))  # that of an expanded tensor may be 0
    return flat.view(torch.uint8)


def pairwise_sum(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of a power of two of tensors: neighbours are added first, then their sums, and so on."""
    parts = list(parts)
    while len(parts) > 1:
        parts = [left + right for left, right in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]
