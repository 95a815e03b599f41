"""The model and the optimizer at the start and in each step: alike on all ranks, or a clear error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from hvd_trainer.errors import BackendError
from hvd_trainer.utils.tensors import parameters_of

if TYPE_CHECKING:
    from hvd_trainer.backends.base import Backend


def synchronize(
    backend: Backend, model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any] | None = None
) -> None:
    """Checks that all ranks built the same model, and gives rank 0's optimizer state and settings to all.

    The state travels as an object. Horovod's `broadcast_optimizer_state` must not be used on a fresh optimizer:
    it takes a step on zero gradients to create the state, after which Adam's first real update is 0.744 of
    what it should be and weight decay has moved the weights (horovod/torch/functions.py; issues 2805, 3743).

    Args:
        state: on rank 0, the optimizer's, where it does not have all of it itself.
    """
    mine: dict[str, Any] = {
        "tensors": [(name, tuple(t.shape), str(t.dtype)) for name, t in model.state_dict().items()],
        "optimizer": optimizer.state_dict() if state is None else state,
    }
    first = backend.broadcast_object(mine if backend.world.is_first else {})
    theirs, ours = first["tensors"], mine["tensors"]
    if theirs != ours:
        difference = next(
            (f"{b} against {a} on rank 0" for a, b in zip(theirs, ours, strict=False) if a != b),
            f"{len(ours)} tensors against {len(theirs)} on rank 0",
        )
        raise BackendError(
            f"Rank {backend.world.rank} built another model than rank 0: {difference}. Build it from the same "
            f"options on all ranks."
        )
    optimizer.load_state_dict(first["optimizer"])


def check_unused(model_names: Mapping[Tensor, str], optimizer: Optimizer) -> None:
    """Raises BackendError if a parameter got no gradient in this step.

    Left alone, the engines differ: Horovod makes the gradient zero, so that weight decay and momentum still
    move the parameter, and DDP stops in the next forward with an error that names nothing.
    """
    unused = [p for p in parameters_of(optimizer) if p.grad is None and p.requires_grad]
    if unused:
        names = ", ".join(model_names.get(p, "?") for p in unused[:5])
        raise BackendError(
            f"{len(unused)} {'parameter' if len(unused) == 1 else 'parameters'} got no gradient in this step "
            f"({names}{', ...' if len(unused) > 5 else ''}). Freeze them with requires_grad_(False); or, where "
            f"other steps use them, add --find-unused-parameters, for which each rank needs the whole model."
        )
