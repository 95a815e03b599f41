"""A batch in micro-batches of one size, and its loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from hvd_trainer.data import Batch, samples_in
from hvd_trainer.errors import DataError
from hvd_trainer.optim.step import ForwardResult
from hvd_trainer.optim.weights import LossFunction, Share, fractions, mean_loss
from hvd_trainer.utils.tensors import detached


class MicroBatch(NamedTuple):
    """One micro-batch; its inputs are padded to the size of the others, its targets are not."""

    inputs: Any
    targets: Any
    samples: int
    """how many of the inputs are not padding; they come first"""
    weight: Tensor | None
    """by the weight function; None without one, and for padding alone"""


def split_batch(
    batch: Batch, chunks: int, size: int, weigh: Callable[[Batch], Tensor | None] = lambda _: None
) -> list[MicroBatch]:
    """Split a batch into micro-batches of `size` samples; the last ones may be padded, or empty.

        10 samples, 4 chunks of 3     0 1 2 | 3 4 5 | 6 7 8 | 9 9 9     counts 3 3 3 1

    All have one shape, because a stage allocates its receive buffers only once.

    Raises:
        DataError: the batch has more samples than all micro-batches.
    """
    inputs, targets = batch
    samples = samples_in(batch)
    if samples > chunks * size:
        raise DataError(
            f"A batch has {samples} samples, and the longest of the first epoch made micro-batches of {chunks} x "
            f"{size}: let the sampler's batches have equal sizes"
        )
    places = torch.arange(chunks * size).clamp(max=max(0, samples - 1))
    cut_up = []
    for start in range(0, chunks * size, size):
        end = max(start, min(start + size, samples))
        real = slice_samples(inputs, start, end), slice_samples(targets, start, end)
        filled = real[0] if end - start == size else _select(inputs, places[start : start + size])
        cut_up.append(MicroBatch(filled, real[1], end - start, weigh(real) if end > start else None))
    return cut_up


def slice_samples(batch: Any, start: int, end: int) -> Any:
    """Return consecutive samples of nested tuples and dictionaries of tensors."""
    return tree_map_only(Tensor, lambda tensor: tensor[start:end], batch)


def _select(batch: Any, places: Tensor) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.index_select(0, places.to(tensor.device)), batch)


class MicroBatchLoss:
    """Compute the loss of each micro-batch of one batch, in the order of the schedule.

    Args:
        share: of the batch in its step.
        finish: returns the tensor to start backward from, given a micro-batch's part of the loss.

    Attributes:
        passes: the forward results, by the micro-batch's number.
    """

    def __init__(
        self, loss: LossFunction, chunks: Sequence[MicroBatch], share: Share, finish: Callable[[Tensor], Tensor]
    ) -> None:
        self._loss, self._chunks, self._share, self._finish = loss, chunks, share, finish
        self._samples = sum(chunk.samples for chunk in chunks)
        weights = [chunk.weight for chunk in chunks if chunk.weight is not None]
        self._weight = torch.stack(weights).sum() if weights else None
        self.passes: dict[int, ForwardResult] = {}

    def __call__(self, outputs: Any, number: Tensor | int) -> Tensor:
        """Return the tensor to start backward from, given a micro-batch's outputs and number."""
        chunk = self._chunks[int(number)]
        if not chunk.samples:
            # All padding: backward still goes through it, with gradients of zero.
            first = next(leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor))
            return self._finish(first.sum() * 0)
        outputs = slice_samples(outputs, 0, chunk.samples)
        loss = mean_loss(self._loss, outputs, chunk.targets, chunk.weight)
        result = ForwardResult(loss.detach(), detached(outputs), chunk.targets, chunk.samples, chunk.weight)
        self.passes[int(number)] = result
        return self._finish(Share(self._fraction(result) * self._share.factor).of(loss))

    def _fraction(self, result: ForwardResult) -> float | Tensor:
        """Return what a micro-batch is of the batch."""
        if result.weight is None or self._weight is None:
            return result.samples / self._samples
        return fractions(result.weight, self._weight)

    def mean(self) -> Tensor | None:
        """Return the mean loss of the batch; None on stages without outputs."""
        if not self.passes:
            return None
        parts = [Share(self._fraction(passed)).of(passed.loss) for _, passed in sorted(self.passes.items())]
        return torch.stack(parts).sum()
