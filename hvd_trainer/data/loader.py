"""Batches for one rank, from tensors in memory or from any `Dataset`; streams are in `stream.py`.

All loaders have the same interface: `epoch(epoch, consumed)` yields this rank's training batches on the training
device; `evaluation()` yields its share of all samples, each exactly once.
"""

from __future__ import annotations

import itertools
import multiprocessing
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pickle import PicklingError
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate, get_worker_info

from hvd_trainer.backends import Backend
from hvd_trainer.data.batch import Batch, CountedBatch, as_pair, collated_samples
from hvd_trainer.data.data_loader import DrawnBatches
from hvd_trainer.data.dataset import TensorData
from hvd_trainer.data.shard import (
    EVALUATION,
    BatchKey,
    Chosen,
    epoch_order,
    evaluation_share,
    num_batches,
    training_batches,
    training_share,
)
from hvd_trainer.data.transfer import Transfer
from hvd_trainer.errors import DataError, first_line
from hvd_trainer.faults import preemption
from hvd_trainer.rendezvous.ranks import cpu_share
from hvd_trainer.utils import accelerator
from hvd_trainer.utils.rng import derive_seed, isolated_rng, seed_all

MAX_WORKERS = 8


@dataclass(frozen=True)
class LoaderPlan:
    """How data is sharded and loaded."""

    batch_size: int
    """samples per batch of a rank, or of a virtual rank"""
    seed: int = 0
    shuffle: bool = True
    virtual_ranks: int | None = None
    """how many virtual ranks a global batch is divided among; None: the ranks themselves"""
    accumulate: int = 1
    """successive batches of a virtual rank in a step"""
    shard: DataShard | None = None
    """this rank's shard of the data; None: one per rank"""
    num_workers: int | None = None
    """worker processes of this rank; None: one less than its CPUs, at most 8"""
    prefetch: int | None = None
    """batches that each worker loads ahead; None: PyTorch's default"""
    batch_transform: Callable[[Any], Any] | None = None
    """converts the inputs of a batch on the training device"""
    renew_workers: bool = False
    """whether workers start again with each pass: they have copies of the data set, which a callback may change"""
    drawn: DrawnBatches | None = None
    """the batches of a `DataLoader`; None: of `batch_size`, in the order of seed and epoch"""
    drop_last: bool = False
    """whether a stream's last samples are left out if they fill no batch"""
    worker_init: Callable[[int], None] | None = None
    """called in each worker process with its number"""
    worker_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """further arguments of the `DataLoader` that starts the worker processes"""


class DataShard(NamedTuple):
    """One of `size` equal shards of the data, counted from 0. Ranks that share a replica have the same one."""

    number: int
    size: int


class Fingerprint(NamedTuple):
    """Two numbers that are equal on all ranks and in all loader processes that have read the same stream.

    They are of the samples at the starts of steps: of a few, as each costs time.
    """

    before: int = 0
    """of the steps before; 0: there are none"""
    after: int = 0
    """of the steps before and this one, below 2**32; 0: not known"""


class Marked(NamedTuple):
    """The first sample that a rank takes from a stream for a step."""

    fingerprint: Fingerprint
    sample: Any


class Given(NamedTuple):
    """A batch from `Collate`, and the number of samples that it was made of."""

    samples: int
    fingerprint: Fingerprint
    batch: Any


class Collate:
    """Make batches, with the number of samples that each was made of; for `DataLoader(collate_fn=)`."""

    def __init__(self, collate: Callable[[list[Any]], Any] | None) -> None:
        self._collate = default_collate if collate is None else collate

    def __call__(self, samples: list[Any]) -> Given:
        fingerprint = Fingerprint()
        if isinstance(samples[0], Marked):
            fingerprint, samples[0] = samples[0]
        return Given(len(samples), fingerprint, self._collate(samples))


class Loader(ABC):
    """This rank's view of a data set.

    Attributes:
        name: of the data set in the start-up summary.
        num_samples: samples in it; None if unknown.
        batches_per_epoch: this rank's training batches in a whole epoch; None if unknown.
        in_memory: whether loading a batch is one operation on tensors.
        has_own_loader: whether the data comes in batches, for which the options of loading do not count.
        shards_by_rank: whether each rank is given other samples than the others.
        is_sent: whether each batch is copied to the training device.
        num_workers: worker processes of this rank.
    """

    in_memory = False
    has_own_loader = False
    shards_by_rank = False
    num_workers = 0

    def __init__(self, data: Any, num_samples: int | None, backend: Backend, plan: LoaderPlan) -> None:
        name = getattr(data, "name", None)
        self.name = name if isinstance(name, str) else type(data).__name__
        self.num_samples, self.backend, self.plan = num_samples, backend, plan
        self._transfer = Transfer(backend.device)
        self.is_sent = not accelerator.is_host(backend.device)
        self._shard = shard = plan.shard or DataShard(backend.world.rank, backend.world.size)
        self._size = plan.virtual_ranks or shard.size
        parts_per_shard = self._size // shard.size
        self._parts = range(shard.number * parts_per_shard, (shard.number + 1) * parts_per_shard)
        self.batches_per_epoch = None
        if plan.drawn is not None:
            self.num_samples = plan.drawn.num_samples
            self.batches_per_epoch = plan.drawn.num_batches * len(self._parts)
        elif num_samples is not None:
            self.batches_per_epoch = num_batches(num_samples, self._size, plan.batch_size) * len(self._parts)

    @abstractmethod
    def epoch(self, epoch: int, consumed: int = 0) -> Iterator[Batch]:
        """Yield this rank's training batches of an epoch.

        Args:
            consumed: samples of the epoch, of all ranks, to skip.
        """

    @abstractmethod
    def evaluation(self) -> Iterator[Batch]:
        """Yield this rank's share of all samples; over all ranks each sample comes exactly once."""

    def check_evaluation(self) -> None:  # noqa: B027  only streams may differ
        """Check that in the last evaluation all ranks have read the same data. A collective.

        Raises:
            DataError: they have not.
        """

    def _other_samples(self) -> str:
        return (
            f"{self.name} gives each rank other samples, and each was to read all samples and take its share. If "
            f"it shares itself out among ranks, give it shards_by_rank = True as an attribute, or leave that to "
            f"the trainer. If it draws other numbers on each rank for the same samples, give it "
            f"shards_by_rank = False."
        )

    def _training(self, epoch: int, consumed: int, device: torch.device = accelerator.CPU) -> Iterable[Chosen]:
        """Return the samples (their indices on a device) of each of this rank's training batches."""
        assert self.num_samples is not None
        plan, size = self.plan, self._size
        if plan.drawn is not None:
            return plan.drawn.training(epoch, self._parts, size, accumulate=plan.accumulate, consumed=consumed)
        order = epoch_order(self.num_samples, seed=plan.seed, epoch=epoch, shuffle=plan.shuffle)
        shares = [(part, training_share(order, part, size, consumed=consumed)) for part in self._parts]
        return training_batches(
            # Copied at once: a copy per batch would be waited for each time.
            [(part, share.contiguous().to(device)) for part, share in shares],
            size=size,
            batch_size=plan.batch_size,
            accumulate=plan.accumulate,
            consumed=consumed,
        )

    def _evaluation(self, device: torch.device = accelerator.CPU) -> list[Chosen]:
        """Return the samples (their indices on a device) of each of this rank's evaluation batches."""
        assert self.num_samples is not None
        number, size = self._shard
        if self.plan.drawn is not None:
            return self.plan.drawn.evaluation(number, size)
        share = evaluation_share(self.num_samples, number, size).to(device)
        # `split` returns one empty part for an empty tensor, and no batch may be empty.
        batches = share.split(self.plan.batch_size) if len(share) else ()
        return [Chosen(BatchKey(position, number), chosen) for position, chosen in enumerate(batches)]

    def _weighed(self, batches: Iterator[Batch], chosen: Iterable[Chosen]) -> Iterator[Batch]:
        """Yield training batches, those that are not as large on each shard with the samples that count."""
        for one, batch in zip(chosen, batches, strict=True):
            if one.samples is None or one.whole is None:
                yield batch
            elif isinstance(batch, CountedBatch):  # whose numbers the ranks will compare
                batch.samples, batch.taken = min(batch.samples, one.samples), one.samples
                yield batch
            elif one.whole % self._size:
                taken = one.whole if one.key.part == self._parts[0] else 0
                counted = CountedBatch(batch, one.samples, taken)
                counted.mean_samples = one.whole / self._size
                yield counted
            else:
                yield batch

    def _to_device(self, batches: Iterable[Any]) -> Iterator[Batch]:
        return self._transformed(map(as_pair, self._transfer.move(batches)))

    def _with_counts(self, batches: Iterable[Given]) -> Iterator[CountedBatch]:
        """Yield batches on the device, with the number of samples that each was made of."""
        transform = self.plan.batch_transform
        for given, fingerprint, batch in self._transfer.move(batches):
            inputs, targets = as_pair(batch)
            samples = collated_samples((inputs, targets), given)
            if samples == 0:
                raise DataError(
                    f"collate made a batch without samples of {given} of {self.name}: let it keep one at least."
                )
            counted = CountedBatch((inputs if transform is None else transform(inputs), targets), samples, given)
            counted.fingerprint = fingerprint.after
            yield counted

    def _agreed(self, batches: Iterator[CountedBatch], empty: str | None) -> Iterator[CountedBatch]:
        """Yield batches, each with what those of all ranks have together; end when a rank has none. A collective.

        Ranks agree on the host while accelerators still compute the step before, because the loop asks for a batch
        one step ahead.

        Args:
            empty: the text of the error; None: there may be no batch.

        Raises:
            DataError: a rank has no batch at all, or another part of the data than it should.
        """
        collectives, ranks = self.backend.collectives, self.backend.world.size
        for number in itertools.count():
            batch = next(batches, None)
            own = [0, 0, 0, 0] if batch is None else [1, batch.samples, batch.taken, batch.fingerprint]
            having, samples, taken, fingerprints = collectives.all_reduce_numbers(own)
            if having < ranks and number == 0 and empty is not None:
                raise DataError(empty)
            if batch is None or having < ranks:
                return
            # Below 2**21 ranks no sum of these numbers is rounded.
            if fingerprints != ranks * batch.fingerprint:
                raise DataError(self._other_samples())
            batch.mean_samples, batch.taken = samples / ranks, round(taken * self._shard.size / ranks)
            yield batch

    def _transformed(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        transform = self.plan.batch_transform
        return batches if transform is None else ((transform(inputs), targets) for inputs, targets in batches)


class TensorLoader(Loader):
    """Take each batch from memory by one indexing operation, on the GPU itself if the data set is small."""

    MAX_FRACTION_OF_FREE_GPU = 0.1
    """How much of the GPU memory that is free before the model is built one data set may take."""
    in_memory = True

    def __init__(self, data: TensorData, backend: Backend, plan: LoaderPlan) -> None:
        super().__init__(data, len(data), backend, plan)
        self._data = data
        self._inputs, self._targets = data.inputs, data.targets
        device = backend.device
        if not accelerator.is_host(device):
            size = data.inputs.nbytes + data.targets.nbytes
            if size < self.MAX_FRACTION_OF_FREE_GPU * torch.accelerator.get_memory_info(device)[0]:
                self._inputs, self._targets = data.inputs.to(device), data.targets.to(device)
        self.is_sent = self._inputs.device != device

    def epoch(self, epoch: int, consumed: int = 0) -> Iterator[Batch]:
        chosen = self._training(epoch, consumed, self._inputs.device)
        if self.plan.drawn is None:
            return self._transformed(self._batches(epoch, chosen))
        return self._weighed(self._transformed(self._batches(epoch, self._tensors(chosen))), chosen)

    def evaluation(self) -> Iterator[Batch]:
        chosen = self._evaluation(self._inputs.device)
        if self.plan.drawn is not None:
            chosen = self._tensors(chosen)
        return self._transformed(self._batches(EVALUATION, chosen))

    def _tensors(self, chosen: Iterable[Chosen]) -> list[Chosen]:
        """Return the same with tensors of indices, copied at once: each copy would be waited for."""
        lists = [one.indices for one in chosen]
        whole = torch.tensor(list(itertools.chain.from_iterable(lists)), dtype=torch.int64)
        tensors = whole.to(self._inputs.device).split(list(map(len, lists)))
        return [one._replace(indices=indices) for one, indices in zip(chosen, tensors, strict=True)]

    def _batches(self, epoch: int, batches: Iterable[Chosen]) -> Iterator[Batch]:
        device = self.backend.device
        draws = self._data.transform is not None and not getattr(self._data.transform, "deterministic", False)
        taken = self._raw(batches)
        for place, inputs, targets in self._transfer.move(taken) if self.is_sent else taken:
            if not draws:
                yield self._data.take(inputs, targets)
                continue
            with isolated_rng(device):
                seed_all(derive_seed(self.plan.seed, epoch, *place), device)
                batch = self._data.take(inputs, targets)
            yield batch

    def _raw(self, batches: Iterable[Chosen]) -> Iterator[tuple[BatchKey, Tensor, Tensor]]:
        """Yield batches before their transform, on the data set's device: they are copied in this compact form."""
        for one in batches:
            yield one.key, self._rows(self._inputs, one.indices), self._rows(self._targets, one.indices)

    def _rows(self, tensor: Tensor, chosen: Tensor) -> Tensor:
        if not self.is_sent:
            return tensor.index_select(0, chosen)
        rows = accelerator.pinned((len(chosen), *tensor.shape[1:]), tensor.dtype)
        return torch.index_select(tensor, 0, chosen, out=rows)


class _Places(NamedTuple):
    """The samples of a batch: their indices, and with the epoch the numbers that seed their random transforms."""

    epoch: int
    indices: list[Any]
    numbers: list[int]


class _BatchSampler(Sampler[Any]):
    """The samples of each batch of one pass.

    They are set before each pass, so that the `DataLoader` and its workers stay.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.batches: Iterable[Chosen] = ()

    def __iter__(self) -> Iterator[_Places]:
        for one in self.batches:
            indices = one.indices if isinstance(one.indices, list) else one.indices.tolist()
            yield _Places(self.epoch, indices, indices if one.numbers is None else one.numbers)


class _SeededDataset(Dataset[Any]):
    """A data set whose random transforms are seeded by seed, epoch and sample.

    So a sample is the same whichever rank and worker loads it, and after a resume. If a sampler draws one several
    times, its place in the epoch counts.
    """

    def __init__(self, data: Any, seed: int) -> None:
        self._data, self._seed = data, seed

    def __getitems__(self, places: _Places) -> list[Any]:
        with isolated_rng(accelerator.CPU) if get_worker_info() is None else nullcontext():
            return self._samples(places)

    def _samples(self, places: _Places) -> list[Any]:
        several = getattr(self._data, "__getitems__", None)
        samples: list[Any] = []
        for index, number in zip(places.indices, places.numbers, strict=True):
            seed_all(derive_seed(self._seed, places.epoch, number), accelerator.CPU)
            # One at a time: what a call for several draws would depend on the size of the batch.
            samples += [self._data[index]] if several is None else several([index])
        return samples


class DatasetLoader(Loader):
    """Load any map-style data set by a `DataLoader`."""

    def __init__(
        self,
        data: Any,
        backend: Backend,
        plan: LoaderPlan,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        super().__init__(data, len(data) if plan.drawn is None else None, backend, plan)
        self._sampler = _BatchSampler()
        # Batches of PyTorch's collate have as many samples as were asked for, on all ranks.
        self._is_counted = collate is not None
        counting = Collate(collate) if self._is_counted else None
        self._loader = torch_loader(
            _SeededDataset(data, plan.seed), backend, plan, counting, batch_sampler=self._sampler
        )
        self.num_workers = self._loader.num_workers

    def epoch(self, epoch: int, consumed: int = 0) -> Iterator[Batch]:
        chosen = self._training(epoch, consumed)
        batches = self._pass(epoch, chosen)
        if self.plan.drawn is not None:
            batches = self._weighed(batches, chosen)
        return self._agreed(batches, None) if self._is_counted else batches

    def evaluation(self) -> Iterator[Batch]:
        return self._pass(EVALUATION, self._evaluation())

    def _pass(self, epoch: int, batches: Iterable[Chosen]) -> Iterator[Any]:
        self._sampler.epoch, self._sampler.batches = epoch, batches
        return self._with_counts(self._loader) if self._is_counted else self._to_device(self._loader)


# A fork server imports this once, and PyTorch with it. By default it imports no more than the main module: where
# that imports PyTorch in a function, each loader process did, at every start.
multiprocessing.set_forkserver_preload(["__main__", __name__])


class _WorkerLoader(DataLoader[Any]):
    """PyTorch's loader, with its way of starting processes: Python's, which is by a fork server from 3.14 on."""

    def __iter__(self) -> Any:
        if not self.num_workers:
            return super().__iter__()
        try:
            with preemption.block_signals():
                return super().__iter__()
        except (AttributeError, TypeError, PicklingError) as error:  # those by which `pickle` refuses
            raise DataError(
                f"The data set and `collate` cannot be sent to loader processes: {first_line(error)}. Define "
                "their classes and functions at the top of a module, not in a function or as a lambda. Or load "
                "without processes: --workers 0. Or begin the script with "
                'multiprocessing.set_start_method("fork"), the default before Python 3.14, which sends nothing.'
            ) from error


class _WorkerInit:
    """Prepare a loader process: for signals, and as a user's function does; for `DataLoader(worker_init_fn=)`."""

    def __init__(self, function: Callable[[int], None] | None) -> None:
        self._function = function

    def __call__(self, worker: int) -> None:
        preemption.init_loader_worker(worker)
        if self._function is not None:
            self._function(worker)


def torch_loader(
    data: Dataset[Any],
    backend: Backend,
    plan: LoaderPlan,
    collate: Callable[[list[Any]], Any] | None,
    *,
    batch_size: int = 1,
    batch_sampler: _BatchSampler | None = None,
) -> DataLoader[Any]:
    """Return a `DataLoader` whose number of workers follows this rank's CPUs; with a sampler its workers stay."""
    num_workers = plan.num_workers
    if num_workers is None:
        num_workers = min(MAX_WORKERS, cpu_share(backend.world, backend.session.peers) - 1)
    return _WorkerLoader(
        data,
        batch_size,
        batch_sampler=batch_sampler,
        num_workers=num_workers,
        prefetch_factor=plan.prefetch if num_workers else None,
        collate_fn=collate,
        pin_memory=not accelerator.is_host(backend.device),
        drop_last=plan.drop_last,
        persistent_workers=num_workers > 0 and batch_sampler is not None and not plan.renew_workers,
        worker_init_fn=_WorkerInit(plan.worker_init),
        # Without its own generator, each pass would draw the workers' seeds from the global one, as dropout does.
        generator=torch.Generator(),
        **(plan.worker_kwargs if num_workers else {}),
    )
