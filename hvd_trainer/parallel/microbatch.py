"""A batch in micro-batches of one size, and its loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from hvd_trainer.data import Batch, samples_in
from hvd_trainer.optim.step import ForwardResult, LossFunction, check_scalar


class MicroBatch(NamedTuple):
    """One micro-batch; its inputs are padded to the size of the others, its targets are not."""

    inputs: Any
    targets: Any
    samples: int
    """how many of the inputs are not padding; they come first"""


def split_batch(batch: Batch, chunks: int, size: int) -> list[MicroBatch]:
    """Split a batch into micro-batches of `size` samples; the last ones may be padded, or empty.

        10 samples, 4 chunks of 3     0 1 2 | 3 4 5 | 6 7 8 | 9 9 9     counts 3 3 3 1

    All have one shape, because a stage allocates its receive buffers only once.
    """
    inputs, targets = batch
    samples = samples_in(batch)
    places = torch.arange(chunks * size).clamp(max=samples - 1)
    cut_up = []
    for start in range(0, chunks * size, size):
        end = min(start + size, samples)
        chosen = places[start : start + size]
        filled = slice_samples(inputs, start, end) if end - start == size else _select(inputs, chosen)
        cut_up.append(MicroBatch(filled, slice_samples(targets, start, max(start, end)), max(0, end - start)))
    return cut_up


def slice_samples(batch: Any, start: int, end: int) -> Any:
    """Return consecutive samples of nested tuples and dictionaries of tensors."""
    return tree_map_only(Tensor, lambda tensor: tensor[start:end], batch)


def _select(batch: Any, places: Tensor) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.index_select(0, places.to(tensor.device)), batch)


class MicroBatchLoss:
    """Compute the loss of each micro-batch of one batch, in the order of the schedule.

    Args:
        weight: of the batch in its step.
        finish: returns the tensor to start backward from, given a micro-batch's share of the loss.

    Attributes:
        passes: the forward results, by the micro-batch's number.
    """

    def __init__(
        self, loss: LossFunction, chunks: Sequence[MicroBatch], weight: float, finish: Callable[[Tensor], Tensor]
    ) -> None:
        self._loss, self._chunks, self._weight, self._finish = loss, chunks, weight, finish
        self._samples = sum(chunk.samples for chunk in chunks)
        self.passes: dict[int, ForwardResult] = {}

    def __call__(self, outputs: Any, number: Tensor | int) -> Tensor:
        """Return the tensor to start backward from, given a micro-batch's outputs and number."""
        chunk = self._chunks[int(number)]
        if not chunk.samples:
            # All padding: backward still goes through it, with gradients of zero.
            first = next(leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor))
            return self._finish(first.sum() * 0)
        outputs = slice_samples(outputs, 0, chunk.samples)
        loss = self._loss(outputs, chunk.targets)
        check_scalar(loss)
        detached = tree_map_only(Tensor, Tensor.detach, outputs)
        self.passes[int(number)] = ForwardResult(loss.detach(), detached, chunk.targets, chunk.samples)
        share = chunk.samples / self._samples * self._weight
        return self._finish(loss if share == 1 else loss * share)

    def mean(self) -> Tensor | None:
        """Return the mean loss of the batch; None on stages without outputs."""
        if not self.passes:
            return None
        parts = [passed.loss * (passed.samples / self._samples) for _, passed in sorted(self.passes.items())]
        return torch.stack(parts).sum()
