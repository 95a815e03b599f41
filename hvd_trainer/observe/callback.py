"""Callbacks: the functions of a job, of the timers and of the profile that the training loop calls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hvd_trainer.backends import Backend, StepResult
from hvd_trainer.config.batch_plan import BatchPlan
from hvd_trainer.config.options import TrainerOptions
from hvd_trainer.data import Batch, Loader
from hvd_trainer.launch.world import World
from hvd_trainer.observe.progress import Progress
from hvd_trainer.observe.run_log import RunLog


class LearningRate(Protocol):
    """The learning rate of the first parameter group, with scaling, warm-up and decay."""

    @property
    def last(self) -> float:
        """The rate of the last step; where that is a tensor on a device, this waits for it."""

    @property
    def last_unread(self) -> float | Tensor:
        """The rate of the last step as a number, or as the tensor that it is."""

    @property
    def full(self) -> float:
        """The scaled rate after warm-up."""


class RunView:
    """A running training, as callbacks, the start-up summary, timers and the profiler see it."""

    options: TrainerOptions
    """all options"""
    backend: Backend
    """the engine"""
    plan: BatchPlan
    """how many samples each rank takes per step"""
    train_loader: Loader
    """this rank's training batches"""
    val_loader: Loader | None
    """this rank's validation batches; None without validation data"""
    model: nn.Module
    """the module that was given to `fit`, without the engine's wrapper"""
    optimizer: Optimizer
    """the optimizer that was given to `fit`"""
    rate: LearningRate
    """the effective learning rate"""
    progress: Progress
    """counters of epochs, steps and samples"""
    log: RunLog
    """the run's log; its folder is None on other ranks than 0 and without --log-dir"""
    stop_reason = ""
    """why a callback of this rank wants to end the training; empty: none does"""

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
        return self.plan.count_steps(self.train_loader.batches_per_epoch)

    def say(self, text: str) -> None:
        """Print a line once for the whole job, unless it is quiet."""
        self.log.info(text)

    def stop(self, reason: str) -> None:
        """End the training on all ranks, saved and with exit code 0; any rank may call it.

        From `on_epoch_end` the training ends with that epoch, and from `on_record` of an evaluation with that.
        From `on_step_end` it ends after the same step on all ranks, half a second later as a rule; with one rank,
        after that step. The reason is printed, and is in the record of the end and in the checkpoint: a run that
        resumes from there has ended, too.

        Args:
            reason: one line, such as "val loss has not improved for 3 epochs".
        """
        self.stop_reason = self.stop_reason or reason or "a callback ended it"


class Callback:
    """Called by the training loop on every rank; override what you need.

    Attributes:
        needs_norm: whether each step's result shall have the gradient's norm, which costs a few operations.
        name: of its state in a checkpoint; empty: that of its class, with a number if there are several.
    """

    needs_norm = False
    name = ""

    def on_step_end(self, run: RunView, result: StepResult) -> None:
        """Act after an optimizer step."""

    def on_epoch_end(self, run: RunView, record: dict[str, Any]) -> None:
        """Act after an epoch, whose line of metrics.jsonl is `record`, before it is saved.

        A training that ends inside an epoch is saved before, as a later run continues with the same epoch.
        """

    def on_record(self, run: RunView, event: str, record: Mapping[str, Any]) -> None:
        """Act on a line of metrics.jsonl, on any rank.

        Args:
            event: `step` that is logged, `evaluation` inside of an epoch, `epoch`, or `end`.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: numbers, texts, tensors, and lists, tuples and dicts of them.

        All ranks call it, and rank 0's is saved.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` of rank 0 returned, on any number of ranks; tensors are on the host."""


class Observer(Callback):
    """A callback that is also open around the whole training, and sees each batch."""

    def around_training(self, run: RunView) -> AbstractContextManager[None]:
        """Return a context that is open while the loop runs; model, optimizer and data are set up before."""
        return nullcontext()

    def on_batches(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Return this rank's batches of an epoch, unchanged, as they are drawn."""
        return batches


def with_state(callbacks: Iterable[Callback]) -> dict[str, Callback]:
    """Return the callbacks that override `state_dict`, by the names of their states in a checkpoint."""
    named: dict[str, Callback] = {}
    for callback in callbacks:
        if type(callback).state_dict is Callback.state_dict:
            continue
        name = callback.name or type(callback).__name__
        alike = sum(other == name or other.startswith(f"{name} ") for other in named)
        named[f"{name} {alike + 1}" if alike else name] = callback
    return named
