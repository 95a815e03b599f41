"""Data whose own loader shards, shuffles and batches it, such as NVIDIA DALI's, FFCV's or WebDataset's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from typing import Any, Protocol, runtime_checkable

from hvd_trainer.backends import Backend
from hvd_trainer.data.batch import Batch, as_pair, first_samples, samples_in
from hvd_trainer.data.loader import DataShard, Loader, LoaderPlan
from hvd_trainer.data.shard import EVALUATION
from hvd_trainer.data.stream import equal_batches
from hvd_trainer.errors import DataError
from hvd_trainer.utils import accelerator
from hvd_trainer.utils.rng import derive_seed, iterate_isolated


@runtime_checkable
class BatchSource(Protocol):
    """Data that comes in ready batches, for a loader that shards by itself.

    Options of loading, such as `--workers` and `--prefetch`, and `collate` do not concern it, and `--reproducible`
    is refused. An attribute `name` is shown at the start.

    A method `__len__`, if there is one, returns the samples that all shards together have in an epoch. With it
    `--warmup-epochs` and `--lr-decay` can be used, and the ranks need not agree on each batch. Each shard has to
    give at least `len() // shard.size` samples in full batches, of which as many are trained on.
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
        length = len(source) if isinstance(source, Sized) else None
        super().__init__(source, length, backend, plan)
        self._source = source
        self._samples_per_shard = None if length is None else length // self._shard.size
        if self._samples_per_shard is not None:
            self.batches_per_epoch = -(-self._samples_per_shard // plan.batch_size)

    def epoch(self, epoch: int, consumed: int = 0) -> Iterator[Batch]:
        if self._samples_per_shard is not None:
            batches = self._counted(self._pass(epoch), self._samples_per_shard)
        else:
            empty = (
                f"{self.name} gave a rank no batch in epoch {epoch + 1}: give each of the {self._shard.size} "
                f"shards some, and a new iterator each time."
            )
            batches = equal_batches(self._pass(epoch), self.backend, empty)
        return self._to_device(self._skip(batches, consumed))

    def evaluation(self) -> Iterator[Batch]:
        return self._to_device(self._pass(EVALUATION))

    def _counted(self, batches: Iterator[Batch], samples: int) -> Iterator[Batch]:
        """Yield full batches, and a last one of the samples that are left: as all ranks do, without an exchange.

        Raises:
            DataError: a batch has fewer samples than are due, or there is none; a shard has no samples.
        """
        shards = self._shard.size
        if samples == 0:
            raise DataError(
                f"{self.name} has {self.num_samples} samples, fewer than its shards ({shards}): give it more, or "
                f"start fewer ranks."
            )
        for done in range(0, samples, self.plan.batch_size):
            due, batch = min(self.plan.batch_size, samples - done), next(batches, None)
            count = 0 if batch is None else samples_in(batch)
            if batch is None or count < due:
                raise DataError(
                    f"{self.name} gave a batch of {count} samples after {done}, where {due} were due: by its "
                    f"length of {self.num_samples}, each of its shards ({shards}) has {samples}. Correct __len__, "
                    f"or give full batches of {self.plan.batch_size}, and a new iterator each time."
                )
            yield batch if count == due else first_samples(batch, due)

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
        limit, first = self.plan.batch_size, 0
        for number, batch in enumerate(map(as_pair, iterate_isolated(self._raw(epoch), seed, accelerator.CPU))):
            count = samples_in(batch)
            if count == 0:
                raise DataError(f"{self.name} gave an empty batch: leave it out.")
            if count > limit or (number == 1 and first < limit):
                wrong = count if count > limit else first
                raise DataError(
                    f"{self.name} gave a batch of {wrong} samples, and a rank's batch has {limit}: make batches "
                    f"of {limit}, or change --batch-size."
                )
            first = first or count
            yield batch

    def _raw(self, epoch: int) -> Iterator[Any]:
        yield from self._source.batches(self._shard, None if epoch == EVALUATION else epoch)
