"""Consecutive blocks of a model as one module: what a rank, or a device, computes."""

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
    """What the random numbers of a block depend on, besides the block: so they are the same wherever it is."""

    seed: int
    step: int
    replica: int
    batch: int
    """its number among those of the step"""
    chunk: int


class StageModule(nn.Module):
    """Some blocks, one after the other.

    Between them goes one value: a tensor or a tuple; of floating point where another process takes over.

    Args:
        blocks: with their numbers in the whole model.
        device: where they are.
        precision: fp32, bf16 or fp16.
        recompute: keep only what goes into each block, and compute the rest anew in backward.
        sends: whether another process has the next block.

    Attributes:
        chunk: the number of the chunk that comes next.
        draws_of: gives what the random numbers of a chunk depend on; None: they come as they come.
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
        self.draws_of: Callable[[int], MicroBatchRNG] | None = None

    def forward(self, *inputs: Any) -> Any:
        value = received(inputs)
        with mixed_precision(self._device, self._precision):
            for number, block in zip(self._numbers, self.blocks, strict=True):
                value = self._compute(number, block, value)
        return sendable(value) if self._sends else value

    def _compute(self, number: int, block: nn.Module, value: Any) -> Any:
        draws = self.draws_of(self.chunk) if self.draws_of is not None and block.training else None

        def compute(value: Any) -> Any:
            if draws is not None:
                seed_all(derive_seed(*draws, number), self._device)
            return block(value)

        if self._recompute and torch.is_grad_enabled():
            return checkpoint(compute, value, use_reentrant=False)
        return compute(value)


class Arrived(torch.autograd.Function):
    """What came from another process. Its gradients can be sent back: each there, in one piece of memory."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        # A tensor that leads to no loss, such as a mask, has got zeros.
        return tuple(grad.contiguous() for grad in grads)


def received(values: Sequence[Any]) -> Any:
    """The value that goes into the first block, from what came in."""
    if any(isinstance(value, Tensor) and value.requires_grad for value in values):
        values = Arrived.apply(*values)
    else:
        # A slice of a batch begins anywhere in memory, and products of matrices may round by where that is.
        values = tree_map_only(Tensor, Tensor.clone, tuple(values))
    return values[0] if len(values) == 1 else tuple(values)


def sendable(value: Any) -> Any:
    """The value as it goes to another process, if it can.

    Raises:
        OptionError: it is not of floating point, which is all that pipelines send back and forth.
    """
    for tensor in value if isinstance(value, tuple) else (value,):
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            found = f"a tensor of {tensor.dtype}" if isinstance(tensor, Tensor) else f"a {type(tensor).__name__}"
            raise OptionError(
                f"Where a model is cut, a block gives a tensor of floating point, or a tuple of such; this gives "
                f"{found}. Give masks as 0.0 and 1.0, or cut elsewhere with --balance"
            )
    return tree_map_only(Tensor, Tensor.contiguous, value)
