"""Data whose own loader shards, shuffles and batches it, such as NVIDIA DALI's, FFCV's or WebDataset's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol, runtime_checkable

from hvd_trainer.backends import Backend
from hvd_trainer.data.batch import Batch, as_pair, samples_in
from hvd_trainer.data.loader import CPU, EVALUATION, DataShard, Loader, LoaderPlan
from hvd_trainer.data.stream import equal_batches
from hvd_trainer.errors import DataError, OptionError
from hvd_trainer.utils.rng import derive_seed, iterate_isolated


@runtime_checkable
class BatchSource(Protocol):
    """Data that comes in ready batches, for a loader that shards by itself.

    Options of loading, such as `--workers` and `--prefetch`, and `collate` do not concern it, and without a length
    there is no `--warmup-epochs`, `--lr-decay` or `--reproducible`. An attribute `name` is shown at the start.
    """

    def batches(self, shard: DataShard, epoch: int | None) -> Iterable[Any]:
        """Return the batches of a shard, from its first one on.

        Each is a pair of inputs and targets with `--batch-size` samples, on data-parallel GPUs with as many for
        each; later ones may have fewer. They must be the same, in the same order, when they are asked for again: a
        resumed epoch skips those that were trained on. A batch is read while the next ones are made, so each needs
        memory of its own.

        Args:
            shard: one of `shard.size`, usually a rank's, and its `shard.number`, counted from 0.
            epoch: counted from 0. None: an evaluation, in which all shards together give each sample once.
        """


class SourceLoader(Loader):
    """Take the batches of a `BatchSource`: in training as many from each rank, of the same sizes.

    While it gives one, random numbers of random, NumPy and torch on the CPU come from seed, epoch and shard. An
    epoch that is resumed with another number of shards skips as many samples, but not the same ones.
    """

    has_own_loader = True

    def __init__(self, source: BatchSource, backend: Backend, plan: LoaderPlan) -> None:
        super().__init__(source, None, backend, plan)
        if plan.virtual_ranks is not None:
            raise OptionError(
                f"--reproducible needs a data set with a length and an order, and {self.name} gives batches."
            )
        self._source = source

    def epoch(self, epoch: int, consumed: int = 0) -> Iterator[Batch]:
        empty = (
            f"{self.name} gave a rank no batch in epoch {epoch + 1}: give each of the {self._shard.size} shards "
            f"some, and a new iterator each time."
        )
        batches = equal_batches(self._pass(epoch), self.backend, empty)
        return self._to_device(self._skip(batches, consumed))

    def evaluation(self) -> Iterator[Batch]:
        return self._to_device(self._pass(EVALUATION))

    def _skip(self, batches: Iterator[Batch], consumed: int) -> Iterator[Batch]:
        skipped = 0
        for batch in batches:
            if skipped < consumed:
                skipped += samples_in(batch) * self._shard.size
            else:
                yield batch

    def _pass(self, epoch: int) -> Iterator[Batch]:
        """Return the batches of the source in an epoch, on whatever device it has them.

        Raises:
            DataError: a batch has not the size that was asked for.
        """
        seed = derive_seed(self.plan.seed, epoch, self._shard.number)
        most, first = self.plan.batch_size, 0
        for number, batch in enumerate(map(as_pair, iterate_isolated(self._raw(epoch), seed, CPU))):
            count = samples_in(batch)
            if count == 0:
                raise DataError(f"{self.name} gave an empty batch: leave it out.")
            if count > most or (number == 1 and first < most):
                found = count if count > most else first
                raise DataError(
                    f"{self.name} gave a batch of {found} samples, and a rank's batch has {most}: make batches of "
                    f"{most}, or change --batch-size."
                )
            first = first or count
            yield batch

    def _raw(self, epoch: int) -> Iterator[Any]:
        yield from self._source.batches(self._shard, None if epoch == EVALUATION else epoch)
