"""The interface of recorders: callbacks of steps, phases and batches, called by PyTorch's hooks or the Trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

if TYPE_CHECKING:
    from hvd_trainer.observe.callback import RunView


@dataclass(frozen=True)
class Step:
    """An optimizer step that has ended."""

    samples: int
    """that were trained on in it"""
    lr: float | Tensor
    """its learning rate; a tensor if the optimizer's is one"""
    losses: Sequence[Tensor] = ()
    """of its passes, on any device; no step waits for them"""
    skipped: Tensor | bool = False
    """whether the update was left out"""
    weights: Sequence[Tensor] = ()
    """of its passes, where a Trainer weighs them"""
    grad_norm: Tensor | None = None
    """of the whole gradient before it was clipped; None if unknown"""


@dataclass(frozen=True)
class End:
    """The end of a training."""

    facts: Mapping[str, Any]
    """of the work, in plain JSON"""
    results: Mapping[str, Any]
    """such as the losses, in plain JSON"""
    weights: str
    """a digest of the final weights"""


class Listener:
    """Callbacks of a training, which do nothing: a recorder overrides those that it needs."""

    def on_run(self, run: RunView) -> None:
        """Take note of the parts of a Trainer's training, before it starts."""

    def on_start(self, device: torch.device, *, on_trainer: bool) -> None:
        """Take note that the training has started: of a script, that its first optimizer step has ended."""

    def on_phase(self, phase: str) -> None:
        """Take note that another phase of `observe.phases.PHASES` begins."""

    def on_batch(self, batch: Any, loader: object) -> None:
        """Take note of a batch that is drawn."""

    def on_pass(self) -> None:
        """Take note of a pass: it uses the oldest batch that was drawn, as the next may be there already."""

    def before_update(self, optimizer: Optimizer, *, again: bool) -> None:
        """Take note that an optimizer updates its parameters next, by the gradients that are there now.

        Args:
            again: whether in the same step, behind a closure or the exchange of Horovod's optimizer.
        """

    def on_step_end(self, step: Step) -> None:
        """Take note of an optimizer step."""

    def on_epoch_end(self, record: Mapping[str, Any]) -> None:
        """Take note that the Trainer has ended an epoch, whose line of metrics.jsonl is `record`."""

    def stop(self) -> None:
        """Record nothing from now on: the training has ended, or a Trainer has begun in the script."""

    def on_end(self, end: End) -> None:
        """Write what was recorded of a training that came to its end."""
