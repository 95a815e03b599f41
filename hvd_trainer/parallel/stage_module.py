"""Consecutive blocks of a model as one module, for one rank or device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from hvd_trainer.errors import OptionError
from hvd_trainer.optim.step import mixed_precision
from hvd_trainer.utils.rng import derive_seed, seed_all


class MicroBatchRNG(NamedTuple):
    """The seeds of a block's random numbers, besides its number: the same wherever the block is."""

    seed: int
    step: int
    replica: int
    batch: int
    """number of the batch in the step"""
    chunk: int


class StageModule(nn.Module):
    """Run some blocks one after the other.

    They pass on one value, a tensor or a tuple; of floating point if another process has the next block.

    Args:
        blocks: with their numbers in the whole model.
        recompute: activation checkpointing: keep only each block's input, and recompute the rest in backward.
        sends: whether another process has the next block.

    Attributes:
        chunk: the number of the next micro-batch.
        rng_of: returns the seeds for a micro-batch; None: the global random state is used.
    """

    def __init__(
        self,
        blocks: Sequence[tuple[int, nn.Module]],
        *,
        device: torch.device,
        precision: str = "fp32",
        recompute: bool = False,
        sends: bool = False,
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block for _, block in blocks)
        self._numbers = [number for number, _ in blocks]
        self._device, self._precision = device, precision
        self._recompute, self._sends = recompute, sends
        self.chunk = 0
        self.rng_of: Callable[[int], MicroBatchRNG] | None = None

    def forward(self, *inputs: Any) -> Any:
        value = unpack_received(inputs)
        with mixed_precision(self._device, self._precision):
            for number, block in zip(self._numbers, self.blocks, strict=True):
                value = self._compute(number, block, value)
        return check_sendable(value) if self._sends else value

    def _compute(self, number: int, block: nn.Module, value: Any) -> Any:
        rng = self.rng_of(self.chunk) if self.rng_of is not None and block.training else None

        def compute(value: Any) -> Any:
            if rng is not None:
                seed_all(derive_seed(*rng, number), self._device)
            return block(value)

        if self._recompute and torch.is_grad_enabled():
            return checkpoint(compute, value, use_reentrant=False)
        return compute(value)


class ReceivedActivations(torch.autograd.Function):
    """Make the gradients of received activations fit to be sent back: none missing, all contiguous."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        # Autograd has filled in zeros for a tensor that does not affect the loss, such as a mask.
        return tuple(grad.contiguous() for grad in grads)


def unpack_received(values: Sequence[Any]) -> Any:
    """Return the input of the first block, given the arguments of the module."""
    if any(isinstance(value, Tensor) and value.requires_grad for value in values):
        values = ReceivedActivations.apply(*values)
    else:
        # A slice of a batch may begin at any address, on whose alignment the rounding of matrix products depends.
        values = tree_map_only(Tensor, Tensor.clone, tuple(values))
    return values[0] if len(values) == 1 else tuple(values)


def check_sendable(value: Any) -> Any:
    """Return a value in contiguous memory, to be sent to another process.

    Raises:
        OptionError: it is not of floating point, as pipelines need.
    """
    for tensor in value if isinstance(value, tuple) else (value,):
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            seen = f"a tensor of {tensor.dtype}" if isinstance(tensor, Tensor) else f"a {type(tensor).__name__}"
            raise OptionError(
                f"Where a model is cut, a block gives a tensor of floating point, or a tuple of such; this gives "
                f"{seen}. Give masks as 0.0 and 1.0, or cut elsewhere with --balance"
            )
    return tree_map_only(Tensor, Tensor.contiguous, value)
