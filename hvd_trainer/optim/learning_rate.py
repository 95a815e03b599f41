"""Scale, warm up and decay the learning rate, in the same way on every engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from hvd_trainer.config.options import Decay
from hvd_trainer.observe.progress import Progress

DECAYS: Mapping[Decay, Callable[[float], float]] = {
    "linear": lambda decayed: 1 - decayed,
    "cosine": lambda decayed: (1 + math.cos(math.pi * decayed)) / 2,
}
"""Each decay: the share of the rate that is left when a fraction of the decay is over."""


class StepRate:
    """The learning rate of each step: the optimizer's, as its scheduler leaves it, times three factors.

    Scaling, warm-up and decay apply only while a step is taken. So the optimizer and any scheduler (chained, in
    closed form) keep the user's numbers, and a checkpoint resumes on any number of ranks. Both curves count epochs
    and their fractions, not steps, of which another number of ranks has others:

            ___
           /   \\__
          /       \\__     warm-up over w epochs, at e epochs, with s of an epoch in a step: (e + s) / (w + s)
         /           \\_   decay over the other epochs: from 1 on a line down to 0, or as half a cosine

    Args:
        optimizer: its groups have the rates.
        progress: keeps the rate of the last step.
        factor: the scaling.
        epochs: of the whole training.
        warmup_epochs: w.
        step_epochs: s; the same for all steps of an epoch, of which the last may be shorter.
        decay: none, or one of `DECAYS`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        progress: Progress,
        *,
        factor: float = 1.0,
        epochs: int = 1,
        warmup_epochs: float = 0.0,
        step_epochs: float = 1.0,
        decay: Decay = "none",
    ) -> None:
        self._optimizer = optimizer
        self._progress = progress
        self._factor = factor
        self._epochs = epochs
        self._warmup_epochs = warmup_epochs
        self._step_epochs = step_epochs
        self._decay = decay
        self._changed: list[tuple[Any, Any]] = []
        """groups, or rates that are tensors, each with the rate to be restored"""

    @property
    def last(self) -> float:
        """The effective rate of the last step, or of the first if there was none; of the first group.

        Waits for the device if the rate is a tensor there.
        """
        self._progress.read_lr()
        last = self._progress.lr
        return self.full * self._fraction(0.0) if last is None else last

    @property
    def last_unread(self) -> float | Tensor:
        """The effective rate of the last step; a tensor if the optimizer's is one."""
        return self.last if self._progress.unread_lr is None else self._progress.unread_lr

    @property
    def full(self) -> float:
        """The scaled rate after warm-up, of the first group."""
        return float(self._optimizer.param_groups[0]["lr"]) * self._factor

    def apply(self, epochs: float) -> StepRate:
        """Set the optimizer's rates to the effective ones of the next step, until the end of the `with` block.

        A rate that is a tensor is changed in place, which a captured optimizer sees, too.

        Args:
            epochs: done before this step, with the fraction of the running one.
        """
        groups, fraction = self._optimizer.param_groups, self._fraction(epochs)
        self._changed.clear()
        for group in groups:
            lr = group["lr"]
            if isinstance(lr, Tensor):
                # Groups may share one.
                if all(tensor is not lr for tensor, _ in self._changed):
                    self._changed.append((lr, lr.detach().clone()))
                    lr.copy_(lr * self._factor * fraction)
            else:
                self._changed.append((group, lr))
                group["lr"] = lr * self._factor * fraction
        self._progress.note_lr(groups[0]["lr"])
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        for target, lr in self._changed:
            if isinstance(target, Tensor):
                target.copy_(lr)
            else:
                target["lr"] = lr

    def _fraction(self, epochs: float) -> float:
        warmup = 1.0
        if epochs < self._warmup_epochs:
            warmup = (epochs + self._step_epochs) / (self._warmup_epochs + self._step_epochs)
        if self._decay == "none" or epochs <= self._warmup_epochs:
            return warmup
        decayed = min(1.0, (epochs - self._warmup_epochs) / (self._epochs - self._warmup_epochs))
        return warmup * DECAYS[self._decay](decayed)
