"""Batches for one rank: from tensors in memory, or from any `Dataset`. Streams are in `stream.py`.

All loaders give the same view: `epoch(epoch, consumed)` yields this rank's batches of training, on the training
device; `evaluation()` yields its share of all samples, each exactly once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from hvd_trainer.backends import Backend
from hvd_trainer.data.batch import Batch, as_pair, to_device
from hvd_trainer.data.dataset import TensorData
from hvd_trainer.data.shard import epoch_order, evaluation_share, num_batches, training_share
from hvd_trainer.peers import fair_cpus

MOST_WORKERS = 8


class Loader(ABC):
    """This rank's view of a data set.

    Attributes:
        name: what the banner calls the data set.
        num_samples: samples in it, or None if it does not tell.
        batches_per_epoch: this rank's training batches in a whole epoch, or None.
    """

    def __init__(self, data: Any, num_samples: int | None, backend: Backend, batch_size: int) -> None:
        name = getattr(data, "name", None)
        self.name = name if isinstance(name, str) else type(data).__name__
        self.num_samples, self.backend, self.batch_size = num_samples, backend, batch_size
        self.batches_per_epoch = (
            None if num_samples is None else num_batches(num_samples, backend.world.size, batch_size)
        )

    @abstractmethod
    def epoch(self, epoch: int, consumed: int = 0) -> Iterator[Batch]:
        """This rank's training batches of an epoch, from the sample `consumed` (of all ranks) on."""

    @abstractmethod
    def evaluation(self) -> Iterator[Batch]:
        """This rank's share of all samples, in batches; over all ranks each sample comes exactly once."""

    def _moved(self, batches: Iterable[Any]) -> Iterator[Batch]:
        for batch in batches:
            yield as_pair(to_device(batch, self.backend.device))


class TensorLoader(Loader):
    """Takes each batch from memory in one indexing operation; on the GPU itself where the data set fits."""

    FRACTION_OF_FREE_GPU = 0.5

    def __init__(self, data: TensorData, backend: Backend, batch_size: int, *, seed: int, shuffle: bool) -> None:
        super().__init__(data, len(data), backend, batch_size)
        self._data, self._seed, self._shuffle = data, seed, shuffle
        self._inputs, self._targets = data.inputs, data.targets
        device = backend.device
        if device.type == "cuda":
            size = sum(t.numel() * t.element_size() for t in (data.inputs, data.targets))
            if size < self.FRACTION_OF_FREE_GPU * torch.cuda.mem_get_info(device)[0]:
                self._inputs, self._targets = data.inputs.to(device), data.targets.to(device)

    def epoch(self, epoch: int, consumed: int = 0) -> Iterator[Batch]:
        world = self.backend.world
        order = epoch_order(len(self._data), seed=self._seed, epoch=epoch, shuffle=self._shuffle)
        return self._batches(training_share(order, world.rank, world.size, consumed=consumed))

    def evaluation(self) -> Iterator[Batch]:
        world = self.backend.world
        return self._batches(evaluation_share(len(self._data), world.rank, world.size))

    def _batches(self, indices: Tensor) -> Iterator[Batch]:
        device = self.backend.device
        # `split` gives one empty part of an empty tensor, and no batch may be empty.
        parts = indices.to(self._inputs.device).split(self.batch_size) if len(indices) else ()
        for chosen in parts:
            inputs, targets = self._inputs.index_select(0, chosen), self._targets.index_select(0, chosen)
            if inputs.device != device:
                inputs, targets = (t.pin_memory().to(device, non_blocking=True) for t in (inputs, targets))
            yield self._data.take(inputs, targets)


class _ShareSampler(Sampler[int]):
    """The indices of one pass, set before it: a `DataLoader` keeps its workers while its sampler changes."""

    def __init__(self) -> None:
        self.indices: list[int] = []

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)


class DatasetLoader(Loader):
    """Any map-style data set, through `DataLoader`."""

    def __init__(
        self,
        data: Any,
        backend: Backend,
        batch_size: int,
        *,
        seed: int,
        shuffle: bool,
        num_workers: int | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        super().__init__(data, len(data), backend, batch_size)
        self._seed, self._shuffle, self._length = seed, shuffle, len(data)
        self._sampler = _ShareSampler()
        self._loader = torch_loader(data, backend, batch_size, seed, num_workers, collate, self._sampler)

    def epoch(self, epoch: int, consumed: int = 0) -> Iterator[Batch]:
        world = self.backend.world
        order = epoch_order(self._length, seed=self._seed, epoch=epoch, shuffle=self._shuffle)
        self._sampler.indices = training_share(order, world.rank, world.size, consumed=consumed).tolist()
        return self._moved(self._loader)

    def evaluation(self) -> Iterator[Batch]:
        world = self.backend.world
        self._sampler.indices = evaluation_share(self._length, world.rank, world.size).tolist()
        return self._moved(self._loader)


def torch_loader(
    data: Dataset[Any],
    backend: Backend,
    batch_size: int,
    seed: int,
    num_workers: int | None,
    collate: Callable[[list[Any]], Any] | None,
    sampler: _ShareSampler | None = None,
) -> DataLoader[Any]:
    """A `DataLoader` with defaults from this rank's share of the CPUs; with a sampler its workers stay."""
    if num_workers is None:
        num_workers = min(MOST_WORKERS, fair_cpus(backend.world, backend.peers) - 1)
    return DataLoader(
        data,
        batch_size,
        sampler=sampler,
        num_workers=num_workers,
        collate_fn=collate,
        pin_memory=backend.device.type == "cuda",
        persistent_workers=num_workers > 0 and sampler is not None,
        # Without its own generator, each pass would draw the workers' seeds from the random state of dropout.
        # And with the same one on each rank, all ranks' workers would augment their samples alike.
        generator=torch.Generator().manual_seed(seed + backend.world.rank),
    )
