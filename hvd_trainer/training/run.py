"""All parts of one training: what `TrainingLoop` works with, and what callbacks receive. Built by `build.py`.

part              on a batch's way
layout            the slice of each batch, and the part of the model, that this rank has
train_loader      yields this rank's batches, on its device
step              trains on them, with the model that the engine has connected to its gradient exchange
progress, metrics, log, callbacks, manager
                  count, measure, write, observe and save
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hvd_trainer.backends import Backend
from hvd_trainer.checkpoint.manager import CheckpointManager
from hvd_trainer.checkpoint.train_state import TrainState
from hvd_trainer.config.batch_plan import BatchPlan
from hvd_trainer.config.options import TrainerOptions
from hvd_trainer.config.stop_condition import StopCondition
from hvd_trainer.data import Loader
from hvd_trainer.faults.preemption import Requeue
from hvd_trainer.launch.world import World
from hvd_trainer.observe.callback import Callback, Observer
from hvd_trainer.observe.memory import PeakMemory
from hvd_trainer.observe.metrics import Metric
from hvd_trainer.observe.progress import Progress
from hvd_trainer.observe.run_log import RunLog
from hvd_trainer.observe.step_timer import FirstStep
from hvd_trainer.optim.learning_rate import StepRate
from hvd_trainer.optim.step import TrainStep
from hvd_trainer.parallel.layout import Layout


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingRun:
    """One training in one world of ranks. A context manager: on exit it releases what holds connections."""

    options: TrainerOptions
    backend: Backend
    layout: Layout
    """the parts of the model and the slice of the data that this rank has"""
    plan: BatchPlan
    """how many samples each rank takes per step"""
    train_loader: Loader
    test_loader: Loader | None
    metrics: Mapping[str, Metric]
    model: nn.Module
    """the module that was given to `fit`, without the engine's wrapper"""
    step: TrainStep
    """trains on the batches of one step"""
    scheduler: LRScheduler | None
    rate: StepRate
    """the effective learning rate"""
    progress: Progress
    """counters of epochs, steps and samples"""
    stop_condition: StopCondition
    """the figure of --until"""
    state: TrainState
    """collects and restores what a checkpoint holds"""
    manager: CheckpointManager
    """saves and restores"""
    requeue: Requeue
    log: RunLog
    peak_memory: PeakMemory
    first_step: FirstStep
    observers: Sequence[Observer]
    callbacks: Sequence[Callback]
    """those of `fit`, then the observers"""
    resources: ExitStack
    """closes step, log and layout"""

    def __enter__(self) -> TrainingRun:
        return self

    def __exit__(self, *_: object) -> None:
        # The engine's connections must be free before it ends, or before ranks meet in another world.
        self.resources.close()

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer that was given to `fit`."""
        return self.step.optimizer

    @property
    def world(self) -> World:
        """This process among all."""
        return self.backend.world

    @property
    def device(self) -> torch.device:
        """Where this rank trains."""
        return self.backend.device

    @property
    def steps_per_epoch(self) -> int | None:
        """Optimizer steps in a whole epoch; None for a stream."""
        return count_steps(self.plan, self.train_loader)

    @property
    def busy_s(self) -> float | None:
        """Seconds in which this rank has computed since the epoch began; None unless it is a stage on a CPU."""
        return self.layout.busy_s

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

    def say(self, text: str) -> None:
        """Print a line once for the whole job, unless it is quiet."""
        self.log.info(text)

    def restore(self) -> None:
        """Resume from the newest snapshot or checkpoint, if there is one. A collective."""
        rate = self.rate.full
        if self.manager.restore(seed=self.options.train.seed, is_over=lambda: self.is_over):
            self.rate.resume(self.progress.step, self.fraction_done)
            if self.rate.full != rate:
                self.say(f"resume   with the checkpoint's learning rate, {self.rate.full:g}, not {rate:g}")


def count_steps(plan: BatchPlan, train_loader: Loader) -> int | None:
    """Return the optimizer steps in a whole epoch; None for a stream."""
    batches = train_loader.batches_per_epoch
    return None if batches is None else -(-batches // plan.passes)
