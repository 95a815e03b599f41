"""What a job can have done at the ends of steps and epochs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hvd_trainer.backends import StepResult

if TYPE_CHECKING:
    from hvd_trainer.trainer import Trainer


class Callback:
    """Called by the trainer on every rank; override what you need."""

    def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
        """After each optimizer step."""

    def on_epoch_end(self, trainer: Trainer, record: dict[str, Any]) -> None:
        """After each epoch, with its line of metrics.jsonl."""
