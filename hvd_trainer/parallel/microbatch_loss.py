"""The loss of a batch in micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from hvd_trainer.errors import OptionError
from hvd_trainer.optim.step import ForwardResult, LossFunction
from hvd_trainer.parallel.microbatch import MicroBatch, slice_samples


class MicroBatchLoss:
    """Compute the loss of each micro-batch of one batch, in the order of the schedule.

    Args:
        loss: returns the mean loss, given outputs and targets.
        chunks: the micro-batches of the batch.
        weight: of the batch in its step.
        finish: returns the tensor to start backward from, given a micro-batch's share of the loss.

    Attributes:
        passes: the forward results, by the micro-batch's number.
    """

    def __init__(
        self,
        loss: LossFunction,
        chunks: Sequence[MicroBatch],
        weight: float,
        finish: Callable[[Tensor], Tensor],
    ) -> None:
        self._loss, self._chunks, self._weight, self._finish = loss, chunks, weight, finish
        self._samples = sum(chunk.samples for chunk in chunks)
        self.passes: dict[int, ForwardResult] = {}

    def __call__(self, outputs: Any, number: Tensor | int) -> Tensor:
        """Return the tensor to start backward from, given a micro-batch's outputs and number."""
        chunk = self._chunks[int(number)]
        if not chunk.samples:
            # All padding: backward still goes through it, with gradients of zero.
            return self._finish(_first_tensor(outputs).sum() * 0)
        outputs = slice_samples(outputs, 0, chunk.samples)
        loss = self._loss(outputs, chunk.targets)
        if loss.numel() != 1:
            raise OptionError(f"The loss function must give one number, the mean, and gave {tuple(loss.shape)}.")
        self.passes[int(number)] = ForwardResult(loss.detach(), _detached(outputs), chunk.targets, chunk.samples)
        share = chunk.samples / self._samples * self._weight
        return self._finish(loss if share == 1 else loss * share)

    def mean(self) -> Tensor | None:
        """Return the mean loss of the batch; None on stages without outputs."""
        if not self.passes:
            return None
        parts = [passed.loss * (passed.samples / self._samples) for _, passed in sorted(self.passes.items())]
        return torch.stack(parts).sum()


def _first_tensor(outputs: Any) -> Tensor:
    return next(leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor))


def _detached(outputs: Any) -> Any:
    return tree_map_only(Tensor, Tensor.detach, outputs)
