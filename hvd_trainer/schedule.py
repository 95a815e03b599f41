"""Learning rates: one rule for scaling, one for warm-up and one for decay, the same on every engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from hvd_trainer.config import Decay
from hvd_trainer.errors import OptionError

Scheduler = LRScheduler | Callable[[Optimizer], LRScheduler]


class StepRate:
    """The learning rate of each step: the optimizer's own, as its scheduler leaves it, times three factors.

    Scaling, warm-up and decay apply only while a step is taken. So the optimizer and any scheduler (chained, in
    closed form) keep the user's numbers, nothing needs a state, and a checkpoint goes on with other ranks.

           ___
          /   \\__            warm-up over n steps, at step t = 0, 1, ...: (t + 1) / (n + 1)
         /       \\__         decay over the others up to step N: 1 - (t - n) / (N - n), or half a cosine of that
        /           \\_

    Args:
        factor: the scaling.
        warmup_steps: n.
        decay: its form.
        steps: N, of all epochs; needed for decay only.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        factor: float,
        warmup_steps: int,
        decay: Decay = "none",
        steps: int | None = None,
    ) -> None:
        self._optimizer, self._factor, self._warmup_steps = optimizer, factor, warmup_steps
        self._decay, self._steps = decay, steps or 0
        self.last = self.full * self._share(0)
        """The effective rate of the last step, or of the first if there was none; of the first group."""

    @property
    def full(self) -> float:
        """The scaled rate after warm-up, of the first group."""
        return float(self._optimizer.param_groups[0]["lr"]) * self._factor

    def go_on(self, step: int) -> None:
        """To be called when the optimizer was restored after so many steps."""
        self.last = self.full * self._share(max(0, step - 1))

    @contextmanager
    def applied(self, step: int) -> Iterator[None]:
        """Inside, the optimizer has the effective rate of this step."""
        groups, share = self._optimizer.param_groups, self._share(step)
        own = [group["lr"] for group in groups]
        self.last = self.full * share
        for group, lr in zip(groups, own, strict=True):
            group["lr"] = lr * self._factor * share
        try:
            yield
        finally:
            for group, lr in zip(groups, own, strict=True):
                group["lr"] = lr

    def _share(self, step: int) -> float:
        warmup = self._warmup_steps
        if step < warmup or self._decay == "none":
            return min(1.0, (step + 1) / (warmup + 1))
        done = min(1.0, (step - warmup) / max(1, self._steps - warmup))
        return 1 - done if self._decay == "linear" else (1 + math.cos(math.pi * done)) / 2


def make_scheduler(scheduler: Scheduler | None, optimizer: Optimizer) -> LRScheduler | None:
    """The scheduler itself, made now if a function was given."""
    if scheduler is None or isinstance(scheduler, LRScheduler):
        return scheduler
    return scheduler(optimizer)


def advance(scheduler: LRScheduler | None, record: Mapping[str, Any]) -> None:
    """One epoch on; a `ReduceLROnPlateau` watches the test loss, or the train loss where there is none."""
    if isinstance(scheduler, ReduceLROnPlateau):
        scheduler.step(record.get("test_loss", record["train_loss"]))
    elif scheduler is not None:
        scheduler.step()


def count_steps(what_for: str, epochs: float, steps_per_epoch: int | None) -> int:
    """How many steps so many epochs are, or a part of one.

    Raises:
        OptionError: the length of an epoch is not known, and there is an option that needs it.
    """
    if epochs == 0:
        return 0
    if steps_per_epoch is None:
        raise OptionError(f"{what_for} needs a data set that knows its length; this one is a stream.")
    return max(1, round(epochs * steps_per_epoch))
