"""The interface of recorders: callbacks of steps, phases and batches, called by PyTorch's hooks or the Trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer


@dataclass(frozen=True)
class Step:
    """An optimizer step that has ended."""

    samples: int
    """that were trained on in it"""
    lr: float
    """its learning rate"""
    losses: Sequence[Tensor] = ()
    """of its passes, on any device; no step waits for them"""
    skipped: Tensor | bool = False
    """whether the update was left out"""


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

    def on_start(self, device: torch.device, *, on_trainer: bool) -> None:
        """Take note that the training has started: of a script, that its first optimizer step has ended."""

    def on_phase(self, phase: str) -> None:
        """Take note that another phase of `observe.phases.PARTS` begins."""

    def on_batch(self, batch: Any, loader: object) -> None:
        """Take note of a batch that is drawn."""

    def on_backward(self, loss: Any) -> None:
        """Take note that a script's backward pass begins, from a tensor or a sequence of tensors."""

    def before_step(self, optimizer: Optimizer) -> None:
        """Take note that a script's optimizer is about to update its parameters."""

    def on_step_end(self, step: Step) -> None:
        """Take note of an optimizer step."""

    def on_epoch_end(self) -> None:
        """Take note that the Trainer has ended an epoch."""

    def stop(self) -> None:
        """Record nothing from now on: the training has ended, or a Trainer has begun in the script."""

    def on_end(self, end: End) -> None:
        """Write what was recorded of a training that came to its end."""
