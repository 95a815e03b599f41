"""Scale, warm up and decay the learning rate, in the same way on every engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from hvd_trainer.config.options import Decay
from hvd_trainer.errors import OptionError

DECAYS: Mapping[Decay, Callable[[float], float]] = {
    "linear": lambda decayed: 1 - decayed,
    "cosine": lambda decayed: (1 + math.cos(math.pi * decayed)) / 2,
}
"""Each decay: the share of the rate that is left when a fraction of the decay is over."""
Scheduler = LRScheduler | Callable[[Optimizer], LRScheduler]


class StepRate:
    """The learning rate of each step: the optimizer's, as its scheduler leaves it, times three factors.

    Scaling, warm-up and decay apply only while a step is taken. So the optimizer and any scheduler (chained, in
    closed form) keep the user's numbers, nothing needs a state, and a checkpoint resumes on any number of ranks.

            ___
           /   \\__
          /       \\__     warm-up over n steps, at step t = 0, 1, ...: (t + 1) / (n + 1)
         /           \\_   decay over the other epochs: from 1 on a line down to 0, or as half a cosine

    Args:
        optimizer: its groups have the rates.
        factor: the scaling.
        warmup_steps: n.
        decay: none, or one of `DECAYS`.
        decay_start: the fraction of all epochs after which the decay begins.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        factor: float,
        warmup_steps: int,
        decay: Decay = "none",
        decay_start: float = 0.0,
    ) -> None:
        self._optimizer = optimizer
        self._factor = factor
        self._warmup_steps = warmup_steps
        self._decay = decay
        self._decay_start = decay_start
        self._before: list[Any] = []
        self.last = self.full * self._fraction(0, 0.0)
        """The effective rate of the last step, or of the first if there was none; of the first group."""

    @property
    def full(self) -> float:
        """The scaled rate after warm-up, of the first group."""
        return float(self._optimizer.param_groups[0]["lr"]) * self._factor

    def resume(self, step: int, done: float) -> None:
        """Set `last` to the rate of the last step of a restored run.

        Args:
            step: steps done.
            done: as in `apply`.
        """
        self.last = self.full * self._fraction(max(0, step - 1), done)

    def apply(self, step: int, done: float) -> StepRate:
        """Set the optimizer's rates to the effective ones of this step, until the end of the `with` block.

        Args:
            step: steps done before this one.
            done: the fraction of all epochs that is done; not of steps, whose number depends on the ranks.
        """
        groups, fraction = self._optimizer.param_groups, self._fraction(step, done)
        self._before = [group["lr"] for group in groups]
        self.last = self.full * fraction
        for group, lr in zip(groups, self._before, strict=True):
            group["lr"] = lr * self._factor * fraction
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        for group, lr in zip(self._optimizer.param_groups, self._before, strict=True):
            group["lr"] = lr

    def _fraction(self, step: int, done: float) -> float:
        warmup = min(1.0, (step + 1) / (self._warmup_steps + 1))
        if self._decay == "none" or done <= self._decay_start:
            return warmup
        decayed = min(1.0, (done - self._decay_start) / (1 - self._decay_start))
        return warmup * DECAYS[self._decay](decayed)


def make_scheduler(scheduler: Scheduler | None, optimizer: Optimizer) -> LRScheduler | None:
    """Return the scheduler; if a function was given, call it with the optimizer."""
    if scheduler is None or isinstance(scheduler, LRScheduler):
        return scheduler
    return scheduler(optimizer)


def step_scheduler(scheduler: LRScheduler | None, record: Mapping[str, Any]) -> None:
    """Step the scheduler after an epoch; `ReduceLROnPlateau` gets the val loss, or the train loss without one."""
    if isinstance(scheduler, ReduceLROnPlateau):
        scheduler.step(record.get("val_loss", record["train_loss"]))
    elif scheduler is not None:
        scheduler.step()


def count_warmup_steps(epochs: float, steps_per_epoch: int | None) -> int:
    """Return the number of steps in `epochs` of warm-up.

    Raises:
        OptionError: the length of an epoch is not known.
    """
    if epochs == 0:
        return 0
    if steps_per_epoch is None:
        raise OptionError("--warmup-epochs needs a data set that knows its length; this one does not.")
    return max(1, round(epochs * steps_per_epoch))


def check_decay(decay: Decay, num_samples: int | None) -> None:
    """Refuse a decay whose end is unknown.

    Raises:
        OptionError: the length of an epoch is not known.
    """
    if decay != "none" and num_samples is None:
        raise OptionError("--lr-decay needs a data set that knows its length; this one does not.")
