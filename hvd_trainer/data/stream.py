"""Streams: data sets that can only be read from the front, sharded while they are read.

The global batch of a step is the next slice of the stream, whatever the number of ranks and workers:

    stream    0 1 2 3 | 4 5 6 7 | 8 9          2 ranks, batch 2: a step is a slice of 4
    rank 0    0   2   | 4   6   | 8            with 2 workers, one reads steps 0, 2, ...
    rank 1      1   3 |   5   7 |   9          and the other steps 1, 3, ...
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import IterableDataset, get_worker_info

from hvd_trainer.backends import Backend
from hvd_trainer.data.batch import Batch, CountedBatch, first_samples, samples_in
from hvd_trainer.data.loader import (
    Collate,
    DataShard,
    Fingerprint,
    Given,
    Loader,
    LoaderPlan,
    Marked,
    torch_loader,
)
from hvd_trainer.data.shard import EVALUATION
from hvd_trainer.errors import DataError
from hvd_trainer.utils import accelerator
from hvd_trainer.utils.rng import derive_seed, iterate_isolated, seed_all
from hvd_trainer.utils.tensors import as_bytes


class _Stream(IterableDataset[Any]):
    """The samples of a stream that belong to one rank, or to one of its workers."""

    def __init__(
        self, data: IterableDataset[Any], rank: int, size: int, batch_size: int, *, is_compared: bool
    ) -> None:
        self.data, self.rank, self.size, self.batch_size = data, rank, size, batch_size
        self.is_compared = is_compared
        self.epoch = self.consumed = self.seed = 0

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        workers, number = (worker.num_workers, worker.id) if worker else (1, 0)
        if worker:
            # Each worker reads all samples, whichever one yields a sample: with the same seed, and as if it were
            # the only one. A stream that shares itself out among the workers would leave out the others' parts.
            for name, value in {"id": 0, "num_workers": 1, "seed": self.seed}.items():
                object.__setattr__(worker, name, value)  # its own refuses
            seed_all(self.seed, accelerator.CPU)
        if hasattr(self.data, "set_epoch"):
            self.data.set_epoch(self.epoch)
        fingerprint = Fingerprint()
        for position, sample in enumerate(self.data, -self.consumed):
            step, place = divmod(position, self.batch_size * self.size)
            if position < 0:
                continue
            if place == 0 and self.is_compared:
                fingerprint = Fingerprint(fingerprint.after, extended(fingerprint.after, sample))
            if step % workers == number and place % self.size == self.rank:
                yield Marked(fingerprint, sample) if place == self.rank else sample


class StreamLoader(Loader):
    """Load an `IterableDataset`, of which every rank and worker reads all samples and takes its share.

    A data set that gives each rank other samples says so by an attribute `shards_by_rank = True`: then each rank
    takes all that it is given. With False, ranks may read other values for the same samples.

    Training leaves out fewer samples per epoch than there are ranks, evaluation none. `set_epoch` of a data set
    that has it is called before each pass.
    """

    def __init__(
        self,
        data: IterableDataset[Any],
        backend: Backend,
        plan: LoaderPlan,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        super().__init__(data, None, backend, plan)
        shards_by_rank = getattr(data, "shards_by_rank", None)
        self.shards_by_rank = bool(shards_by_rank)
        self._given_to = self._shard.size if shards_by_rank else 1
        shard = DataShard(0, 1) if shards_by_rank else self._shard
        self._stream = _Stream(data, *shard, plan.batch_size, is_compared=shards_by_rank is None)
        self._evaluated: list[int] = []
        # Workers have copies of the data set, so they are started again in each epoch to know its number.
        self._loader = torch_loader(self._stream, backend, plan, Collate(collate), batch_size=plan.batch_size)
        self.num_workers = self._loader.num_workers

    def epoch(self, epoch: int, consumed: int = 0) -> Iterator[Batch]:
        # An interruption may have come after the last batch of an epoch.
        empty = None if consumed else f"{self.name} gave fewer samples than there are ranks: nothing to train on."
        return self._agreed(self._pass(epoch, consumed), empty)

    def evaluation(self) -> Iterator[Batch]:
        self._evaluated = []
        for batch in self._pass(EVALUATION, 0):
            self._evaluated.append(batch.fingerprint)
            yield batch

    def check_evaluation(self) -> None:
        # Where ranks have unequal numbers of batches, those that all have are compared.
        steps = zip(*self.backend.collectives.all_gather_object(self._evaluated), strict=False)
        if any(len(set(step)) > 1 for step in steps):
            raise DataError(self._other_samples())

    def _pass(self, epoch: int, consumed: int) -> Iterator[CountedBatch]:
        """Read the stream once, with random numbers seeded by seed and epoch: the same on all ranks.

        They are also drawn for skipped samples, so that a resumed pass continues with the same ones; those
        that a `collate` draws are not drawn again. A collective.
        """
        self._stream.consumed = consumed // self._given_to
        if epoch != EVALUATION:
            self._stream.epoch = epoch
        self._stream.seed = seed = derive_seed(self.plan.seed, epoch)
        batches = self._with_counts(self._same_in_processes())
        return batches if self._loader.num_workers else iterate_isolated(batches, seed, accelerator.CPU)

    def _same_in_processes(self) -> Iterator[Given]:
        """Yield batches, each once the loader process that made it has read what the others have.

        Raises:
            DataError: it has read other samples.
        """
        before = 0
        for batch in self._loader:
            if batch.fingerprint.before != before:
                raise DataError(
                    f"{self.name} gives each loader process other samples, and each was to read all samples and "
                    f"take its share. Let it give all, or load without processes: --workers 0."
                )
            before = batch.fingerprint.after
            yield batch


def extended(fingerprint: int, sample: Any) -> int:
    """Return a fingerprint that a further sample is added to; of an object of no known kind its type counts."""
    digest = hashlib.blake2b(fingerprint.to_bytes(4, "big"), digest_size=4)
    for leaf in tree_leaves(sample):
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
            digest.update(
                as_bytes(leaf.detach().cpu().resolve_conj().resolve_neg().contiguous()).numpy().tobytes()
            )
        elif isinstance(leaf, np.ndarray) and leaf.dtype != object:
            digest.update(leaf.tobytes())
        elif isinstance(leaf, str | bytes | int | float | np.generic):
            digest.update(repr(leaf).encode())
        else:
            digest.update(type(leaf).__name__.encode())
    return int.from_bytes(digest.digest(), "big")


def equal_batches(batches: Iterator[Batch], backend: Backend, empty: str | None) -> Iterator[Batch]:
    """Yield batches of which each is as large as those of all ranks; end when a rank has none. A collective.

    At the end the ranks may have unequal numbers left. Before each step they agree on the smallest batch among
    them, and take that many samples. They agree on the host while accelerators still compute the step before,
    because the loop asks for a batch one step ahead.

    Args:
        empty: the text of the error; None: there may be no batch.

    Raises:
        DataError: a rank has no batch at all.
    """
    for number in itertools.count():
        batch = next(batches, None)
        own = 0 if batch is None else samples_in(batch)
        smallest = int(backend.collectives.all_reduce_numbers([own], "min")[0])
        if smallest == 0 and number == 0 and empty is not None:
            raise DataError(empty)
        if batch is None or smallest == 0:
            return
        yield batch if smallest == own else first_samples(batch, smallest)
