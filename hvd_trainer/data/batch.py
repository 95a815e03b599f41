"""Batches: pairs of inputs and targets, each a tensor or nested tuples and dictionaries of tensors."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from copy import copy
from typing import Any

import torch
from torch import Tensor

from hvd_trainer.errors import DataError
from hvd_trainer.utils import accelerator
from hvd_trainer.utils.tensors import tensors_in

Batch = tuple[Any, Any]


class CountedBatch(tuple[Any, Any]):
    """A batch whose number of samples is not its length on each rank: of a stream, or from a `collate`.

    Attributes:
        samples: in it.
        mean_samples: in the batches of all shards for the same pass, on average.
        taken: samples of the epoch that all shards together have taken for this pass.
        fingerprint: of the data up to this batch: equal on ranks that have read the same stream; 0: not known.
    """

    def __new__(cls, pair: Batch, samples: int, taken: int) -> CountedBatch:
        """Return a batch of one shard; `mean_samples` and `taken` are known when shards have agreed."""
        batch = super().__new__(cls, pair)
        batch.samples, batch.mean_samples, batch.taken = samples, float(samples), taken
        return batch

    samples: int
    mean_samples: float
    taken: int
    fingerprint = 0


def as_pair(batch: Any) -> Batch:
    """Return a batch as a tuple of inputs and targets.

    Raises:
        DataError: it is anything else, such as a dictionary of both.
    """
    if isinstance(batch, list | tuple) and len(batch) == 2:
        return batch[0], batch[1]
    seen = f"a {type(batch).__name__}"
    if isinstance(batch, Mapping):
        seen += f" with {', '.join(map(str, batch))}"
    elif isinstance(batch, list | tuple):
        seen += f" of {len(batch)}"
    raise DataError(
        f"A batch should be a pair of inputs and targets, but is {seen}. Let the data set give pairs, or give "
        f"the trainer collate=, a function that makes a pair of batches from a list of samples."
    )


def to_device(batch: Any, device: torch.device, *, tensors_only: bool = False) -> Any:
    """Move every tensor in nested tuples, lists and mappings to a device; lists become tuples.

    Args:
        tensors_only: leave objects that move themselves, such as a PackedSequence or a graph, where they are.
    """
    if isinstance(batch, Tensor):
        return accelerator.copy_to(batch, device)
    if isinstance(batch, Mapping):
        return _with_values(
            batch, {key: to_device(value, device, tensors_only=tensors_only) for key, value in batch.items()}
        )
    if callable(getattr(batch, "to", None)):
        return batch if tensors_only else batch.to(device)
    if isinstance(batch, list | tuple):
        values = [to_device(value, device, tensors_only=tensors_only) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else tuple(values)
    return batch


def samples_in(batch: Any) -> int:
    """Return the number of samples in a batch: as it was counted, or the length of its first tensor.

    Raises:
        DataError: there is no tensor in it.
    """
    if isinstance(batch, CountedBatch):
        return batch.samples
    # Asked for several times a step: the common pair of tensors without a generator.
    first = batch[0] if isinstance(batch, tuple) and batch else batch
    if isinstance(first, Tensor):
        return first.shape[0]
    for tensor in tensors_in(batch):
        return tensor.shape[0]
    raise DataError(f"A batch should hold tensors, but this {type(batch).__name__} has none.")


def mean_samples(batch: Batch) -> float:
    """Return the samples in the batches of all shards for the same pass, on average."""
    return batch.mean_samples if isinstance(batch, CountedBatch) else samples_in(batch)


def samples_taken(batch: Batch, shards: int) -> int:
    """Return how many samples of the epoch all shards together have taken for a pass."""
    return batch.taken if isinstance(batch, CountedBatch) else samples_in(batch) * shards


def collated_samples(batch: Batch, given: int) -> int:
    """Return the samples in a batch that a `collate` made of `given`: fewer, if it has dropped some.

    It has dropped some if the first tensors of inputs and targets have the same smaller length, or targets are a
    shorter list of mappings, such as the boxes of each image. Other lengths are no numbers of samples: those of
    packed tokens, of sequences before samples, (T, N), or of the tensors in lists with one for each sample.
    """
    inputs, targets = batch
    if isinstance(targets, list | tuple) and targets and all(isinstance(one, Mapping) for one in targets):
        return min(len(targets), given)
    firsts = [next(tensors_in(part), None) for part in batch]
    if any(tensor is None or tensor.ndim == 0 for tensor in firsts):
        return given
    lengths = {tensor.shape[0] for tensor in firsts if tensor is not None}
    is_sequence_first = all(tensor.shape[1:2] == (given,) for tensor in firsts if tensor is not None)
    are_lists = _is_list_of(inputs, given) and _is_list_of(targets, given)
    return given if len(lengths) > 1 or is_sequence_first or are_lists else min(*lengths, given)


def _is_list_of(part: Any, samples: int) -> bool:
    """Return whether inputs or targets may be lists, also of several fields, with a value for each sample."""
    if isinstance(part, Tensor):
        return part.shape[:1] == (samples,)
    parts = [*part.values()] if isinstance(part, Mapping) else part if isinstance(part, list | tuple) else []
    return len(parts) == samples or any(_is_list_of(one, samples) for one in parts)


def first_samples(batch: Any, count: int) -> Any:
    """Return the first `count` samples of a batch.

    A list or tuple is either of fields, each with all samples, or of samples, such as an image's boxes for each.
    It is of samples if it has as many values as the batch has samples, and not each of its tensors has.
    """
    return _first_of(batch, count, samples_in(batch))


def _first_of(value: Any, count: int, samples: int) -> Any:
    if isinstance(value, Tensor):
        return value[:count]
    if isinstance(value, Mapping):
        return _with_values(value, {key: _first_of(part, count, samples) for key, part in value.items()})
    if not isinstance(value, list | tuple):
        return value
    lengths = [tensor.shape[0] if tensor.ndim else None for tensor in tensors_in(value)]
    of_samples = len(value) == samples and not (lengths and all(length == samples for length in lengths))
    if of_samples and not any(_has_length(part, samples) for part in value):
        return value[:count]
    parts = [_first_of(part, count, samples) for part in value]
    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)


def _has_length(value: Any, length: int) -> bool:
    return isinstance(value, list | tuple) and not any(tensors_in(value)) and len(value) == length


def _with_values(mapping: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    """Return a copy with other values, of the same class if that is one of its own, such as Transformers' has."""
    if isinstance(mapping, dict) or not isinstance(mapping, MutableMapping):
        return values
    copied = copy(mapping)
    copied.update(values)
    return copied
