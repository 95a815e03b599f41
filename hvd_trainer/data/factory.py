"""The choice of a loader for a data set."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeGuard, TypeVar

from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from hvd_trainer.backends import Backend
from hvd_trainer.data.batch_source import BatchSource, SourceLoader
from hvd_trainer.data.dataset import TensorData
from hvd_trainer.data.loader import DatasetLoader, Loader, LoaderPlan, TensorLoader
from hvd_trainer.data.stream import StreamLoader
from hvd_trainer.errors import DataError

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
            for), a `Dataset`, a list of samples, an `IterableDataset`, a `DataLoader` of these, or a
            `BatchSource`. A sample is a pair of inputs and targets.
        plan: how data is sharded and loaded.
        collate: makes a batch from a list of samples, as in `DataLoader`.

    Raises:
        DataError: `data` is none of these, or empty.
    """
    if isinstance(data, DataLoader):
        data, plan, collate = _taken_from(data, backend, plan)
    kind = type(data).__name__
    # A data set of PyTorch's may have an attribute of this name for something else.
    if isinstance(data, BatchSource) and not isinstance(data, Dataset | type):
        return SourceLoader(data, backend, plan)
    if isinstance(data, IterableDataset):
        return StreamLoader(data, backend, plan, collate)
    if not hasattr(data, "__getitem__") or not (hasattr(data, "__len__") or plan.drawn):
        raise DataError(
            f"Cannot load batches from a {kind}: a data set has __len__ and __getitem__, or derives from "
            f"torch.utils.data.IterableDataset; a loader that shards by itself is a BatchSource."
        )
    if plan.drawn is None and len(data) == 0:
        raise DataError(f"The data set ({kind}) is empty.")
    if _is_read_as(data, TensorDataset) and len(data.tensors) == 2:
        data = TensorData(*data.tensors, name=kind)
    if _is_read_as(data, TensorData) and not plan.num_workers and collate is None:
        return TensorLoader(data, backend, plan)
    return DatasetLoader(data, backend, plan, collate)


def _taken_from(
    loader: DataLoader[Any], backend: Backend, plan: LoaderPlan
) -> tuple[Any, LoaderPlan, Callable[[list[Any]], Any] | None]:
    """Return the data set of a `DataLoader`, the plan with all that it asks for, and its `collate`.

    Options of loading that are set count more than what it asks for.
    """
    is_stream = isinstance(loader.dataset, IterableDataset)
    workers = loader.num_workers if plan.num_workers is None else plan.num_workers
    shards = backend.world.size if plan.shard is None else plan.shard.size
    batch_size = -(-(loader.batch_size or 1) // shards) if is_stream else plan.batch_size
    plan = replace(
        plan,
        batch_size=batch_size,
        num_workers=workers,
        prefetch=loader.prefetch_factor if plan.prefetch is None and workers else plan.prefetch,
        drop_last=is_stream and loader.drop_last,
        worker_init=loader.worker_init_fn,
        worker_kwargs={"timeout": loader.timeout, "multiprocessing_context": loader.multiprocessing_context},
    )
    collate = None if loader.collate_fn is default_collate else loader.collate_fn
    return loader.dataset, plan, collate


def _is_read_as(data: Any, base: type[T]) -> TypeGuard[T]:
    """Whether the samples of a data set are those of a class: it derives from it, and reads none by itself."""
    methods = ("__getitem__", "__getitems__", "__len__")
    return isinstance(data, base) and all(
        getattr(type(data), method, None) is getattr(base, method, None) for method in methods
    )
