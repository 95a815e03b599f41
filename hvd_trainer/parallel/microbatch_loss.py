"""The loss of a batch that comes chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from hvd_trainer.errors import OptionError
from hvd_trainer.optim.step import ForwardResult, LossFunction
from hvd_trainer.parallel.microbatch import MicroBatch, take


class MicroBatchLoss:
    """The loss of each chunk of one batch, as the schedule asks for it.

    Args:
        loss: gives the mean loss from outputs and targets.
        chunks: of the batch.
        weight: of the batch in its step.
        finish: makes of a chunk's share what backward begins with.
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
        """What backward starts from, of the chunk of this number."""
        chunk = self._chunks[int(number)]
        if not chunk.samples:
            # Nothing real is in it. Backward goes through it all the same, with a gradient of zeros.
            return self._finish(_first_tensor(outputs).sum() * 0)
        outputs = take(outputs, 0, chunk.samples)
        loss = self._loss(outputs, chunk.targets)
        if loss.numel() != 1:
            raise OptionError(f"The loss function must give one number, the mean, and gave {tuple(loss.shape)}.")
        self.passes[int(number)] = ForwardResult(loss.detach(), _detached(outputs), chunk.targets, chunk.samples)
        share = chunk.samples / self._samples * self._weight
        return self._finish(loss if share == 1 else loss * share)

    def mean(self) -> Tensor | None:
        """The mean loss of the batch; None where no outputs are."""
        if not self.passes:
            return None
        parts = [passed.loss * (passed.samples / self._samples) for _, passed in sorted(self.passes.items())]
        return torch.stack(parts).sum()


def _first_tensor(outputs: Any) -> Tensor:
    return next(leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor))


def _detached(outputs: Any) -> Any:
    return tree_map_only(Tensor, Tensor.detach, outputs)
