"""Model and optimizer at the start: alike on all ranks, or a clear error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from hvd_trainer.backends.collectives import Collectives
from hvd_trainer.errors import BackendError
from hvd_trainer.utils.optimizer_state import load_in_place
from hvd_trainer.utils.tensors import without_extra_state


def synchronize(
    collectives: Collectives, model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any] | None = None
) -> None:
    """Check that all ranks built the same model, and give rank 0's optimizer state and settings to all.

    The state is sent as an object. Horovod's `broadcast_optimizer_state` must not be used on a fresh optimizer:
    it takes a step on zero gradients to create the state, after which Adam's first real update is 0.744 of
    what it should be and weight decay has moved the weights (horovod/torch/functions.py; issues 2805, 3743).

    Args:
        state: on rank 0, the optimizer's state dict, where the optimizer does not have all of it itself.

    Raises:
        BackendError: the ranks built different models.
    """
    check_same_model(collectives, model)
    own: dict[str, Any] = optimizer.state_dict() if state is None else dict(state)
    load_in_place(optimizer, collectives.broadcast_object(own if collectives.world.is_first else {}))


def check_same_model(collectives: Collectives, model: nn.Module) -> None:
    """Check that all ranks have the same model: names, shapes, types, and what is trained. A collective.

    Raises:
        BackendError: they have not; on all ranks.
    """
    trained = {name: None if p.is_meta else p.requires_grad for name, p in model.named_parameters()}
    own = [
        (name, tuple(t.shape), str(t.dtype), trained.get(name))
        for name, t in without_extra_state(model.state_dict()).items()
    ]
    reference = collectives.broadcast_object(own if collectives.world.is_first else [])
    other = next(((a, b) for a, b in zip(reference, own, strict=False) if not _fit(a, b)), None)
    difference = ""
    if other is not None:
        difference = f"{_in_words(other[1])} against {_in_words(other[0])} on rank 0"
    elif len(own) != len(reference):
        difference = f"{len(own)} tensors against {len(reference)} on rank 0"
    for rank, text in enumerate(collectives.all_gather_object(difference)):
        if text:
            raise BackendError(
                f"Rank {rank} has another model than rank 0: {text}. Build it from the same options on all ranks, "
                "and change it alike."
            )


_Described = tuple[str, tuple[int, ...], str, bool | None]
"""Name, shape and type of a tensor; of a parameter also whether it is trained, which only its stage knows."""


def _fit(one: _Described, other: _Described) -> bool:
    return one[:3] == other[:3] and (None in (one[3], other[3]) or one[3] == other[3])


def _in_words(tensor: _Described) -> str:
    name, shape, dtype, is_trained = tensor
    return f"{name} {dtype.removeprefix('torch.')} {list(shape)}{' frozen' if is_trained is False else ''}"
