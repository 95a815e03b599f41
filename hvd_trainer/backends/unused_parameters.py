"""Parameters that got no gradient in a step: refused, or left as they are, on both engines alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

from hvd_trainer.errors import BackendError
from hvd_trainer.utils.tensors import parameters_of


def check_unused(parameter_names: Mapping[Tensor, str], optimizer: Optimizer) -> None:
    """Raise BackendError if a parameter got no gradient in this step.

    Left alone, the engines differ: Horovod makes the gradient zero, so that weight decay and momentum still
    move the parameter, and DDP stops in the next forward with an error that names nothing.
    """
    unused = [p for p in parameters_of(optimizer) if p.grad is None and p.requires_grad]
    if unused:
        names = ", ".join(parameter_names.get(p, "?") for p in unused[:5])
        raise BackendError(
            f"{len(unused)} {'parameter' if len(unused) == 1 else 'parameters'} got no gradient in this step "
            f"({names}{', ...' if len(unused) > 5 else ''}). Freeze them with requires_grad_(False); or, where "
            f"other steps use them, add --find-unused-parameters, for which each rank needs the whole model."
        )


def unused_everywhere(optimizer: Optimizer, all_reduce_max: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Return the parameters for which no rank has a gradient. A collective.

    Args:
        optimizer: whose parameters are looked at, in its order.
        all_reduce_max: returns the maximum of an int32 tensor over ranks, element by element.
    """
    parameters = list(parameters_of(optimizer))
    used_here = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32)
    used = all_reduce_max(used_here).tolist()
    return [parameter for parameter, is_used in zip(parameters, used, strict=True) if not is_used]
