"""All parts of one training, which `TrainingLoop` works with (callbacks see a `RunView`). Built by `build.py`.

part              on a batch's way
placement         the slice of each batch, and the part of the model, that this rank has
train_loader      yields this rank's batches, on its device
step              trains on them, with the model that the engine has connected to its gradient exchange
progress, metrics, log, callbacks, manager
                  count, measure, write, observe and save
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from torch.optim.lr_scheduler import LRScheduler

from hvd_trainer.checkpoint.manager import CheckpointManager
from hvd_trainer.checkpoint.train_state import TrainState
from hvd_trainer.config.stop_condition import StopCondition
from hvd_trainer.faults.preemption import Requeue
from hvd_trainer.observe.callback import Callback, Observer, RunView
from hvd_trainer.observe.first_step import FirstStep
from hvd_trainer.observe.memory import PeakMemory
from hvd_trainer.observe.metrics import Metric
from hvd_trainer.optim.learning_rate import StepRate
from hvd_trainer.optim.step import TrainStep
from hvd_trainer.parallel.placement import ModelPlacement


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingRun(RunView):
    """One training in one world of ranks. A context manager: on exit it releases what holds connections."""

    placement: ModelPlacement
    """the parts of the model and the slice of the data that this rank has"""
    metrics: Mapping[str, Metric]
    step: TrainStep
    """trains on the batches of one step"""
    scheduler: LRScheduler | None
    rate: StepRate
    stop_condition: StopCondition
    """the figure of --until"""
    state: TrainState
    """collects and restores what a checkpoint holds"""
    manager: CheckpointManager
    """saves and restores"""
    requeue: Requeue
    peak_memory: PeakMemory
    first_step: FirstStep
    observers: Sequence[Observer]
    callbacks: Sequence[Callback]
    """those of `fit`, then the observers"""
    leave_out: Collection[str]
    """parts that a tool wants left out, to see what they cost: `exchange`, `data`"""
    resources: ExitStack
    """closes step, log and placement"""

    def __enter__(self) -> TrainingRun:
        return self

    def __exit__(self, *_: object) -> None:
        # The engine's connections must be free before it ends, or before ranks meet in another world.
        self.resources.close()

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to train: by epochs, by steps or by the stop condition."""
        train, progress = self.options.train, self.progress
        ended = progress.epoch >= train.epochs or progress.step >= (train.max_steps or math.inf)
        return ended or self.stop_condition.is_reached(progress.figures)

    @property
    def fraction_done(self) -> float:
        """The fraction of all epochs that is done, from 0 to 1; for a stream in whole epochs."""
        progress, samples = self.progress, self.train_loader.num_samples
        of_epoch = 0.0 if samples is None else min(1.0, progress.consumed / samples)
        return (progress.epoch + of_epoch) / self.options.train.epochs

    def restore(self) -> None:
        """Resume from the newest snapshot or checkpoint, if there is one. A collective."""
        rate = self.rate.full
        if self.manager.restore(seed=self.options.train.seed, is_over=lambda: self.is_over):
            self.rate.resume(self.progress.step, self.fraction_done)
            if self.rate.full != rate:
                self.say(f"resume   with the checkpoint's learning rate, {self.rate.full:g}, not {rate:g}")
