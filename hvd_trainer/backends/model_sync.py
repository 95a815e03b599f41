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
    frozen = {
        name for name, parameter in model.named_parameters() if not (parameter.requires_grad or parameter.is_meta)
    }
    own = [
        (name, tuple(t.shape), str(t.dtype), "frozen" if name in frozen else "")
        for name, t in without_extra_state(model.state_dict()).items()
    ]
    reference = collectives.broadcast_object(own if collectives.world.is_first else [])
    difference = ""
    if reference != own:
        difference = next(
            (f"{b} against {a} on rank 0" for a, b in zip(reference, own, strict=False) if a != b),
            f"{len(own)} tensors against {len(reference)} on rank 0",
        )
    for rank, text in enumerate(collectives.all_gather_object(difference)):
        if text:
            raise BackendError(
                f"Rank {rank} has another model than rank 0: {text}. Build it from the same options on all ranks, "
                "and change it alike."
            )
