"""Whether ranks were given the same data, of which each takes its share: as far as memory tells.

A data set of a user's own may draw random numbers or read files for a sample, so only its type and length count.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from hvd_trainer.backends import Backend
from hvd_trainer.data.batch_source import BatchSource
from hvd_trainer.data.dataset import TensorData
from hvd_trainer.data.per_node import SharedDataError
from hvd_trainer.data.stream import extended

MAX_ELEMENTS = 2**14
"""Elements of a tensor that are read, evenly spaced."""
MAX_INDICES = 64
"""Indices of a subset that are compared, evenly spaced."""


class DataFacts(NamedTuple):
    """Type, length and fingerprint of a data set, of which no file is read and no sample is computed."""

    kind: str
    samples: int | None
    """None: not known, or those of one rank"""
    fingerprint: int
    """of its samples, below 2**32; 0: not known"""


def check_same_data(backend: Backend, **data: Any) -> None:
    """Check that all ranks were given the same data sets. A collective.

    Args:
        data: by the names of the arguments.

    Raises:
        SharedDataError: on all ranks, if some were given others.
    """
    if backend.world.size == 1:
        return
    everyone = backend.collectives.all_gather_object([tuple(_facts(one)) for one in data.values()])
    for name, *facts in zip(data, *everyone, strict=True):
        for rank, other in enumerate(facts):
            if other != facts[0]:
                raise SharedDataError(_refusal(name, rank, DataFacts(*other), DataFacts(*facts[0])))


def _refusal(name: str, rank: int, other: DataFacts, first: DataFacts) -> str:
    """Return the text of the error that a rank was given other data than rank 0."""
    advice = (
        "give every rank the whole data set, which the Trainer itself shards, and draw it alike, such as by "
        "random_split(..., generator=torch.Generator().manual_seed(0))"
    )
    if other.kind != first.kind:
        return f"{name} is {other.kind} on rank {rank} and {first.kind} on rank 0: {advice}"
    if other.samples != first.samples:
        return f"{name} has {other.samples} samples on rank {rank} and {first.samples} on rank 0: {advice}"
    return (
        f"{name} has other samples on rank {rank} than on rank 0: {advice}; or, if only the values of the same "
        f"samples differ, give it shards_by_rank = False as an attribute"
    )


def _facts(data: Any) -> DataFacts:
    kind = "None" if data is None else type(data).__name__
    if isinstance(data, DataLoader):
        return _facts(data.dataset)._replace(kind=kind)
    is_source = isinstance(data, BatchSource) and not isinstance(data, Dataset | type)
    if is_source or isinstance(data, IterableDataset) or not hasattr(data, "__len__"):
        return DataFacts(kind, None, 0)
    return DataFacts(kind, len(data), functools.reduce(extended, _parts(data), 0))


def _parts(data: Any) -> Iterator[Any]:
    """Yield what is in memory and tells a data set from another one: little of it, so that it takes no time."""
    if getattr(data, "shards_by_rank", None) is False:
        return
    if isinstance(data, Subset):
        yield [data.indices[place] for place in range(0, len(data), -(-len(data) // MAX_INDICES) or 1)]
        yield from _parts(data.dataset)
    elif isinstance(data, ConcatDataset):
        for part in _ends(data.datasets):
            yield from _parts(part)
    elif isinstance(data, TensorData | TensorDataset):
        tensors = (data.inputs, data.targets) if isinstance(data, TensorData) else data.tensors
        for tensor in tensors:
            yield list(tensor.shape)
            yield [_thinned(row) for row in _ends(tensor)]
    elif type(data) in (list, tuple):
        yield [_thinned(leaf) for leaf in tree_leaves(_ends(data))]


def _ends(values: Sequence[Any] | Tensor) -> list[Any]:
    """Return the first, the middle and the last of some values."""
    return [values[place] for place in sorted({0, len(values) // 2, len(values) - 1})] if len(values) else []


def _thinned(leaf: Any) -> Any:
    """Return a few elements of a tensor or array; anything else as it is."""
    if isinstance(leaf, Tensor) and leaf.layout is torch.strided or isinstance(leaf, np.ndarray):
        flat = leaf.reshape(-1)
        return flat[:: -(-len(flat) // MAX_ELEMENTS) or 1]
    # A file's folder may be another one on each node.
    return leaf.rpartition("/")[2] if isinstance(leaf, str) else leaf
