"""Cutting a batch into micro-batches of one size."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from hvd_trainer.data import Batch, samples_in


class MicroBatch(NamedTuple):
    """One micro-batch: its inputs are filled up to the size of the others, and its targets are not."""

    inputs: Any
    targets: Any
    samples: int
    """real ones, which come first"""


def cut(batch: Batch, chunks: int, size: int) -> list[MicroBatch]:
    """Cuts a batch into so many micro-batches of `size` samples; the last ones may be filled up, or empty.

        10 samples, 4 chunks of 3     0 1 2 | 3 4 5 | 6 7 8 | 9 9 9     counts 3 3 3 1

    All have one shape, because a stage makes room for what it receives only once.
    """
    inputs, targets = batch
    samples = samples_in(batch)
    places = torch.arange(chunks * size).clamp(max=samples - 1)
    cut_up = []
    for start in range(0, chunks * size, size):
        end = min(start + size, samples)
        chosen = places[start : start + size]
        filled = take(inputs, start, end) if end - start == size else _select(inputs, chosen)
        cut_up.append(MicroBatch(filled, take(targets, start, max(start, end)), max(0, end - start)))
    return cut_up


def take(batch: Any, start: int, end: int) -> Any:
    """Some consecutive samples of nested tuples and dictionaries of tensors."""
    return tree_map_only(Tensor, lambda tensor: tensor[start:end], batch)


def _select(batch: Any, places: Tensor) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.index_select(0, places.to(tensor.device)), batch)
