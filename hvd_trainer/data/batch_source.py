"""Data whose own loader shards, shuffles and batches it, such as NVIDIA DALI's, FFCV's or WebDataset's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol, runtime_checkable

from hvd_trainer.backends import Backend
from hvd_trainer.data.batch import Batch, samples_in
from hvd_trainer.data.loader import CPU, EVALUATION, DataShard, Loader, LoaderPlan
from hvd_trainer.data.stream import equal_batches
from hvd_trainer.errors import DataError, OptionError
from hvd_trainer.utils.rng import derive_seed, iterate_isolated


@runtime_checkable
class BatchSource(Protocol):
    """Data that comes in ready batches, for a loader that shards by itself.

    `--workers` and `collate` do not concern it. An attribute `name` is shown in the start-up summary.
    """

    def batches(self, shard: DataShard, epoch: int | None) -> Iterable[Any]:
        """Return the batches of a shard, each a pair of inputs and targets with at most `--batch-size` samples.

        They must be the same, in the same order, when they are asked for again: a resumed epoch skips those that
        were trained on. A batch must keep its values until the second one after it is asked for.

        Args:
            shard: `number` of `size` shards, counted from 0; usually rank and number of ranks.
            epoch: counted from 0. None: an evaluation, in which all shards together give each sample once.
        """


class SourceLoader(Loader):
    """Take the batches of a `BatchSource`: in training as many from each rank, of the same sizes.

    While it gives one, random numbers of torch, random and NumPy come from seed, epoch and shard. An epoch that is
    resumed with another number of shards skips as many samples, but not the same ones.
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
        skipped = 0
        for batch in equal_batches(self._pass(epoch), self.backend, self.name):
            if skipped < consumed:
                skipped += samples_in(batch) * self._shard.size
            else:
                yield batch

    def evaluation(self) -> Iterator[Batch]:
        return self._pass(EVALUATION)

    def _pass(self, epoch: int) -> Iterator[Batch]:
        seed = derive_seed(self.plan.seed, epoch, self._shard.number)
        return map(self._checked, self._to_device(iterate_isolated(self._raw(epoch), seed, CPU)))

    def _raw(self, epoch: int) -> Iterator[Any]:
        yield from self._source.batches(self._shard, None if epoch == EVALUATION else epoch)

    def _checked(self, batch: Batch) -> Batch:
        count, most = samples_in(batch), self.plan.batch_size
        if not 0 < count <= most:
            raise DataError(
                f"{self.name} gave a batch of {count} samples, and a rank's batch has {most} (--batch-size): make "
                f"batches of {most}, or add --batch-size {count or most}."
            )
        return batch
