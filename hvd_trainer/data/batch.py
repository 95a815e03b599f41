"""Batches: pairs of inputs and targets, each a tensor or nested tuples and dictionaries of tensors."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from copy import copy
from typing import Any

import torch
from torch import Tensor

from hvd_trainer.errors import DataError
from hvd_trainer.utils.tensors import tensors_in

Batch = tuple[Any, Any]


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


def to_device(batch: Any, device: torch.device) -> Any:
    """Move every tensor in nested tuples, lists and mappings to a device; lists become tuples."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return _with_values(batch, {key: to_device(value, device) for key, value in batch.items()})
    if isinstance(batch, list | tuple):
        values = [to_device(value, device) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else tuple(values)
    return batch


def samples_in(batch: Any) -> int:
    """Return the number of samples in a batch: the length of its first tensor.

    Raises:
        DataError: there is no tensor in it.
    """
    # Asked for several times a step: the common pair of tensors without a generator.
    first = batch[0] if isinstance(batch, tuple) and batch else batch
    if isinstance(first, Tensor):
        return first.shape[0]
    for tensor in tensors_in(batch):
        return tensor.shape[0]
    raise DataError(f"A batch should hold tensors, but this {type(batch).__name__} has none.")


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
