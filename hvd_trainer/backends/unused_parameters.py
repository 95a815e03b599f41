"""Parameters that got no gradient in a step: refused, or left as they are, on both engines alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

from hvd_trainer.errors import BackendError
from hvd_trainer.utils.tensors import parameters_of
from hvd_trainer.utils.text import plural


def check_unused(parameter_names: Mapping[Tensor, str], optimizer: Optimizer) -> None:
    """Raise BackendError if a parameter of the model got no gradient in this step, or a frozen one got one.

    Left alone, the engines differ: Horovod makes the gradient zero, so that weight decay and momentum still
    move the parameter, and DDP stops in the next forward with an error that names nothing. The gradient of a
    parameter that was frozen in the middle of a step would be that of one rank.
    """
    # A callback may have unfrozen those of other stages on this rank, too, where they have no contents.
    parameters = (p for p in parameters_of(optimizer) if not p.is_meta)
    frozen = next((p for p in parameters if not (p.requires_grad or p.grad is None)), None)
    if frozen is not None:
        raise BackendError(
            f"{parameter_names.get(frozen, '?')} was frozen in the middle of a step, after it had got a gradient, "
            "which no rank has sent to the others. Freeze and unfreeze between steps, or before the first use in "
            "forward."
        )
    # Those that the optimizer does not have, too: DDP waits for all that require a gradient.
    wrong = [name for p, name in parameter_names.items() if p.requires_grad and p.grad is None and not p.is_meta]
    if not wrong:
        return
    names = f"{', '.join(wrong[:5])}{', ...' if len(wrong) > 5 else ''}"
    raise BackendError(
        f"{plural(len(wrong), 'parameter')} got no gradient in this step ({names}). Freeze them with "
        "requires_grad_(False); or, where other steps use them, add --find-unused-parameters, for which each rank "
        "needs the whole model."
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
