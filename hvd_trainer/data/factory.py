"""The choice of a loader for a data set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeGuard, TypeVar

from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from hvd_trainer.backends import Backend
from hvd_trainer.data.batch_source import BatchSource, SourceLoader
from hvd_trainer.data.dataset import TensorData
from hvd_trainer.data.loader import DatasetLoader, Loader, LoaderPlan, TensorLoader
from hvd_trainer.data.stream import StreamLoader
from hvd_trainer.errors import DataError, OptionError

T = TypeVar("T")


def make_loader(
    data: Any,
    backend: Backend,
    plan: LoaderPlan,
    *,
    collate: Callable[[list[Any]], Any] | None = None,
) -> Loader:
    """Return the loader for a data set.

    Args:
        data: `TensorData` or `TensorDataset` of two tensors (in memory, unless workers or a `collate` are asked
            for), a `Dataset`, a list of samples, an `IterableDataset`, or a `BatchSource`. A sample is a pair of
            inputs and targets.
        plan: how data is sharded and loaded.
        collate: makes a batch from a list of samples, as in `DataLoader`.

    Raises:
        DataError: `data` is none of these, or empty.
        OptionError: virtual ranks for a stream or a source of batches, or prefetching without workers.
    """
    loader = _make_loader(data, backend, plan, collate)
    if plan.prefetch is not None and not loader.num_workers:
        raise OptionError(
            f"--prefetch {plan.prefetch} is for loader processes, and the data set ({loader.name}) is loaded "
            f"without: {'' if loader.has_own_loader else 'add --workers 2, or '}leave it out"
        )
    return loader


def _make_loader(
    data: Any, backend: Backend, plan: LoaderPlan, collate: Callable[[list[Any]], Any] | None
) -> Loader:
    kind = type(data).__name__
    if isinstance(data, DataLoader):
        raise DataError(
            "Give the data set, not a DataLoader: the trainer shards and batches it itself. "
            "With `loader` being yours, that is loader.dataset; batch size and workers are options."
        )
    # A data set of PyTorch's may have an attribute of this name for something else.
    if isinstance(data, BatchSource) and not isinstance(data, Dataset | type):
        return SourceLoader(data, backend, plan)
    if isinstance(data, IterableDataset):
        return StreamLoader(data, backend, plan, collate)
    if not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):
        raise DataError(
            f"Cannot load batches from a {kind}: a data set has __len__ and __getitem__, or derives from "
            f"torch.utils.data.IterableDataset; a loader that shards by itself is a BatchSource."
        )
    if len(data) == 0:
        raise DataError(f"The data set ({kind}) is empty.")
    if _is_read_as(data, TensorDataset) and len(data.tensors) == 2:
        data = TensorData(*data.tensors, name=kind)
    if _is_read_as(data, TensorData) and not plan.num_workers and collate is None:
        return TensorLoader(data, backend, plan)
    return DatasetLoader(data, backend, plan, collate)


def _is_read_as(data: Any, base: type[T]) -> TypeGuard[T]:
    """Whether the samples of a data set are those of a class: it derives from it, and reads none by itself."""
    methods = ("__getitem__", "__getitems__", "__len__")
    return isinstance(data, base) and all(
        getattr(type(data), method, None) is getattr(base, method, None) for method in methods
    )
