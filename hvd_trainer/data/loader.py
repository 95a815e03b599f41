"""Batches for one rank: from tensors in memory, or from any `Dataset`. Streams are in `stream.py`.

All loaders give the same view: `epoch(epoch, consumed)` yields this rank's batches of training, on the training
device; `evaluation()` yields its share of all samples, each exactly once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

from hvd_trainer.backends import Backend
from hvd_trainer.data.batch import Batch, as_pair, to_device
from hvd_trainer.data.dataset import TensorData
from hvd_trainer.data.shard import epoch_order, evaluation_share, num_batches, training_share
from hvd_trainer.peers import fair_cpus
from hvd_trainer.random_state import apart, seed_all, seed_of

MOST_WORKERS = 8
EVALUATION = -1
"""Stands for the epoch in the seeds of random transforms."""
CPU = torch.device("cpu")


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
        return self._batches(training_share(order, world.rank, world.size, consumed=consumed), epoch, consumed)

    def evaluation(self) -> Iterator[Batch]:
        world = self.backend.world
        return self._batches(evaluation_share(len(self._data), world.rank, world.size), EVALUATION)

    def _batches(self, indices: Tensor, epoch: int, consumed: int = 0) -> Iterator[Batch]:
        device, world = self.backend.device, self.backend.world
        draws = self._data.transform is not None and not getattr(self._data.transform, "deterministic", False)
        # `split` gives one empty part of an empty tensor, and no batch may be empty.
        parts = indices.to(self._inputs.device).split(self.batch_size) if len(indices) else ()
        for number, chosen in enumerate(parts):
            inputs, targets = self._inputs.index_select(0, chosen), self._targets.index_select(0, chosen)
            if inputs.device != device:
                inputs, targets = (t.pin_memory().to(device, non_blocking=True) for t in (inputs, targets))
            with apart(device) if draws else nullcontext():
                if draws:
                    position = consumed + number * self.batch_size * world.size
                    seed_all(seed_of(self._seed, epoch, position, world.rank), device)
                batch = self._data.take(inputs, targets)
            yield batch


class _ShareSampler(Sampler[tuple[int, int]]):
    """The epoch and the indices of one pass, set before it: a `DataLoader` keeps its workers meanwhile."""

    def __init__(self) -> None:
        self.epoch = 0
        self.indices: list[int] = []

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return ((self.epoch, index) for index in self.indices)

    def __len__(self) -> int:
        return len(self.indices)


class _Seeded(Dataset[Any]):
    """A data set whose random transforms draw by the seed, the epoch and the sample.

    So a sample looks the same whichever rank and worker loads it, and after a resume too.
    """

    def __init__(self, data: Any, seed: int) -> None:
        self._data, self._seed = data, seed

    def __getitems__(self, places: Sequence[tuple[int, int]]) -> list[Any]:
        with apart(CPU) if get_worker_info() is None else nullcontext():
            return self._samples(places)

    def _samples(self, places: Sequence[tuple[int, int]]) -> list[Any]:
        if hasattr(self._data, "__getitems__"):
            seed_all(seed_of(self._seed, *places[0]), CPU)
            return list(self._data.__getitems__([index for _, index in places]))
        samples = []
        for epoch, index in places:
            seed_all(seed_of(self._seed, epoch, index), CPU)
            samples.append(self._data[index])
        return samples


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
        self._loader = torch_loader(
            _Seeded(data, seed), backend, batch_size, num_workers, collate, sampler=self._sampler
        )

    def epoch(self, epoch: int, consumed: int = 0) -> Iterator[Batch]:
        world = self.backend.world
        order = epoch_order(self._length, seed=self._seed, epoch=epoch, shuffle=self._shuffle)
        return self._pass(epoch, training_share(order, world.rank, world.size, consumed=consumed))

    def evaluation(self) -> Iterator[Batch]:
        world = self.backend.world
        return self._pass(EVALUATION, evaluation_share(self._length, world.rank, world.size))

    def _pass(self, epoch: int, indices: Tensor) -> Iterator[Batch]:
        self._sampler.epoch, self._sampler.indices = epoch, indices.tolist()
        return self._moved(self._loader)


def torch_loader(
    data: Dataset[Any],
    backend: Backend,
    batch_size: int,
    num_workers: int | None,
    collate: Callable[[list[Any]], Any] | None,
    *,
    sampler: _ShareSampler | None = None,
    generator: torch.Generator | None = None,
) -> DataLoader[Any]:
    """A `DataLoader` with defaults from this rank's share of the CPUs; with a sampler its workers stay.

    `generator` gives the workers' seeds. Without one of its own, each pass would draw them from the random state
    of dropout.
    """
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
        generator=generator or torch.Generator(),
    )
