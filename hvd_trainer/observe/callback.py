"""What a job can have done at the ends of steps and epochs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from hvd_trainer.backends import StepResult
from hvd_trainer.data import Batch

if TYPE_CHECKING:
    from hvd_trainer.training.trainer import Trainer


class Callback:
    """Called by the trainer on every rank; override what you need.

    Attributes:
        needs_norm: whether each step's result shall have the gradient's norm, which costs a few operations.
    """

    needs_norm = False

    def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
        """After each optimizer step."""

    def on_epoch_end(self, trainer: Trainer, record: dict[str, Any]) -> None:
        """After each epoch, with its line of metrics.jsonl."""


class Observer(Callback):
    """A callback that also stands around the whole training, and sees the batches."""

    def at_work(self) -> AbstractContextManager[None]:
        """The training runs inside; model, optimizer and data are set up."""
        return nullcontext()

    def seen(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """This rank's batches of an epoch, as they pass by."""
        return batches
