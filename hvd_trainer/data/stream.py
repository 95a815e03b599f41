"""Streams: data sets that can only be read from the front, sharded while they are read.

The global batch of a step is the next slice of the stream, whatever the number of ranks and workers:

    stream    0 1 2 3 | 4 5 6 7 | 8 9          2 ranks, batch 2: a step is a slice of 4
    rank 0    0   2   | 4   6   | 8            with 2 workers, one reads steps 0, 2, ...
    rank 1      1   3 |   5   7 |   9          and the other steps 1, 3, ...
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from hvd_trainer.backends import Backend
from hvd_trainer.data.batch import Batch, first_samples, samples_in
from hvd_trainer.data.loader import CPU, EVALUATION, Loader, LoaderPlan, torch_loader
from hvd_trainer.errors import DataError, OptionError
from hvd_trainer.utils.rng import derive_seed, iterate_isolated, seed_all


class _Stream(IterableDataset[Any]):
    """The samples of a stream that belong to one rank, or to one of its workers."""

    def __init__(self, data: IterableDataset[Any], rank: int, size: int, batch_size: int) -> None:
        self.data, self.rank, self.size, self.batch_size = data, rank, size, batch_size
        self.epoch = self.consumed = self.seed = 0

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        workers, number = (worker.num_workers, worker.id) if worker else (1, 0)
        if worker:
            # The same seed in all workers, because each reads all samples, whichever one yields a sample.
            seed_all(self.seed, CPU)
        if hasattr(self.data, "set_epoch"):
            self.data.set_epoch(self.epoch)
        for position, sample in enumerate(itertools.islice(self.data, self.consumed, None)):
            step, place = divmod(position, self.batch_size * self.size)
            if step % workers == number and place % self.size == self.rank:
                yield sample


class StreamLoader(Loader):
    """Load an `IterableDataset`, of which every rank and worker reads all samples and takes its share.

    Training leaves out fewer samples per epoch than there are ranks, evaluation none.

    `set_epoch` of a data set that has it is called before each pass.
    """

    def __init__(
        self,
        data: IterableDataset[Any],
        backend: Backend,
        plan: LoaderPlan,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        super().__init__(data, None, backend, plan)
        if plan.virtual_ranks is not None:
            raise OptionError(
                f"--reproducible needs a data set with a length and an order, and {self.name} is a stream."
            )
        self._stream = _Stream(data, *self._shard, plan.batch_size)
        # Workers have copies of the data set, so they are started again in each epoch to know its number.
        self._loader = torch_loader(self._stream, backend, plan, collate, batch_size=plan.batch_size)
        self.num_workers = self._loader.num_workers

    def epoch(self, epoch: int, consumed: int = 0) -> Iterator[Batch]:
        # An interruption may have come after the last batch of an epoch.
        empty = None if consumed else f"{self.name} gave fewer samples than there are ranks: nothing to train on."
        return equal_batches(self._pass(epoch, consumed), self.backend, empty)

    def evaluation(self) -> Iterator[Batch]:
        return self._pass(EVALUATION, 0)

    def _pass(self, epoch: int, consumed: int) -> Iterator[Batch]:
        """Read the stream once, with random transforms seeded by seed, epoch and shard.

        They also run on skipped samples, so that a resumed pass continues with the same random numbers; those
        that a `collate` draws are not drawn again.
        """
        self._stream.consumed = consumed
        if epoch != EVALUATION:
            self._stream.epoch = epoch
        self._stream.seed = seed = derive_seed(self.plan.seed, epoch, self._shard.number)
        batches = self._to_device(self._loader)
        return batches if self._loader.num_workers else iterate_isolated(batches, seed, CPU)


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
