"""Load data as options, batches and placement say: for a training, and for an evaluation by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hvd_trainer.backends import Backend
from hvd_trainer.config.batch_plan import BatchPlan
from hvd_trainer.config.options import TrainOptions
from hvd_trainer.data import DataShard, DrawnBatches, Loader, LoaderPlan, make_loader


@dataclass(frozen=True, kw_only=True)
class Loading:
    """How the data of one training, or of one evaluation, is loaded."""

    backend: Backend
    train: TrainOptions
    plan: BatchPlan
    shard: DataShard
    """this rank's"""
    collate: Callable[[list[Any]], Any] | None
    batch_transform: Callable[[Any], Any] | None
    renew_workers: bool = False
    """whether loader processes start again with each pass, because a callback may change the data"""

    def make_loader(self, data: Any, drawn: DrawnBatches | None, *, shuffle: bool) -> Loader:
        """Return this rank's loader for a data set.

        Args:
            drawn: what `draw_batches` has returned for it.
        """
        train = self.train
        loader_plan = LoaderPlan(
            batch_size=self.plan.batch_size * self.backend.num_replicas,
            seed=train.seed,
            shuffle=shuffle,
            virtual_ranks=train.reproducible,
            accumulate=train.accumulate,
            shard=self.shard,
            num_workers=train.workers,
            prefetch=train.prefetch,
            batch_transform=self.batch_transform,
            renew_workers=self.renew_workers,
            drawn=drawn,
        )
        return make_loader(data, self.backend, loader_plan, collate=self.collate)
