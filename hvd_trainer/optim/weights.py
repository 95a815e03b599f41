"""Weigh batches: by their samples, or by a function of the user's, such as the number of tokens that count.

    rank 0    90 tokens, mean loss a    10 tokens, mean loss b      step: (90 a + 10 b + 60 c + 0 d) / 160
    rank 1    60 tokens, mean loss c     0 tokens, no loss d

Each rank adds up its passes, and the engine averages over n ranks. So a pass's loss is multiplied by its weight,
n / 160 here, before backward: gradients come out right, and loss scaling, compression and clipping need not know.
Samples need no exchange: all ranks have equally many in a step, or the loader says how many they have on average.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hvd_trainer.data import Batch
from hvd_trainer.errors import OptionError
from hvd_trainer.utils import accelerator
from hvd_trainer.utils.tensors import tensors_in

LossFunction = Callable[[Any, Any], Tensor]
WeightFunction = Callable[[Batch], Any]


class Share(NamedTuple):
    """What a pass is of its step."""

    factor: float | Tensor
    """its loss is multiplied by this before backward"""
    weight: Tensor | None = None
    """what the weight function gave; None without one"""

    def of(self, loss: Tensor) -> Tensor:
        """Return a pass's part of the step's loss."""
        if isinstance(self.factor, Tensor):
            return loss * self.factor.to(loss.dtype)
        return loss if self.factor == 1 else loss * self.factor


def weight_of(function: WeightFunction, batch: Batch, device: torch.device) -> Tensor:
    """Return a batch's weight by the user's function: float64, shape (), on a device that is not waited for.

    Raises:
        OptionError: the function does not give one number.
    """
    value = function(batch)
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return accelerator.copy_to(value.detach().reshape(()), device, torch.float64)
    if isinstance(value, numbers.Real):
        return torch.full((), float(value), dtype=torch.float64, device=device)
    seen = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    raise OptionError(
        f"weight= must give one number for a batch, and gave {seen}. Let it return the sum, such as "
        f"(batch[1] != -100).sum()"
    )


def fractions(weights: Tensor, whole: Tensor) -> Tensor:
    """Return weights divided by another; zeros if that is zero, so that no weight at all makes zero gradients."""
    return (weights / whole).nan_to_num(0.0, 0.0, 0.0)


def mean_loss(loss: LossFunction, outputs: Any, targets: Any, weight: Tensor | None = None) -> Tensor:
    """Return the mean loss of a batch (a scalar).

    Args:
        weight: if it is 0, a mean may be 0/0: the loss is 0 then, and so are the gradients of the outputs.

    Raises:
        OptionError: the loss function has given more than one number, or none.
    """
    if weight is not None:
        is_counted = weight != 0
        for tensor in tensors_in(outputs):
            if tensor.grad_fn is not None:  # a hook of a parameter would stay for other batches
                tensor.register_hook(lambda gradient: gradient.where(is_counted, 0.0))
    value = loss(outputs, targets)
    if not isinstance(value, Tensor) or value.numel() != 1:
        seen = tuple(value.shape) if isinstance(value, Tensor) else f"no tensor, but {value!r}"
        raise OptionError(f"The loss function must give one number, the mean, and gave {seen}.")
    return value if weight is None else value.where(is_counted, 0.0)
