"""Splitting a batch into micro-batches of one size."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from hvd_trainer.data import Batch, samples_in


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
