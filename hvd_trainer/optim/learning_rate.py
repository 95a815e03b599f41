"""Learning rates: one rule for scaling, one for warm-up and one for decay, the same on every engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from hvd_trainer.config.options import Decay
from hvd_trainer.errors import OptionError

Scheduler = LRScheduler | Callable[[Optimizer], LRScheduler]


class StepRate:
    """The learning rate of each step: the optimizer's own, as its scheduler leaves it, times three factors.

    Scaling, warm-up and decay apply only while a step is taken. So the optimizer and any scheduler (chained, in
    closed form) keep the user's numbers, nothing needs a state, and a checkpoint goes on with other ranks.

            ___
           /   \\__
          /       \\__     warm-up over n steps, at step t = 0, 1, ...: (t + 1) / (n + 1)
         /           \\_   decay over the other epochs: from 1 on a line down to 0, or as half a cosine

    Args:
        factor: the scaling.
        warmup_steps: n.
        decay: its form.
        begins: the share of all epochs that is behind when the decay begins.
    """

    def __init__(
        self, optimizer: Optimizer, factor: float, warmup_steps: int, decay: Decay = "none", begins: float = 0.0
    ) -> None:
        self._optimizer, self._factor, self._warmup_steps = optimizer, factor, warmup_steps
        self._decay, self._begins = decay, begins
        self.last = self.full * self._share(0, 0.0)
        """The effective rate of the last step, or of the first if there was none; of the first group."""

    @property
    def full(self) -> float:
        """The scaled rate after warm-up, of the first group."""
        return float(self._optimizer.param_groups[0]["lr"]) * self._factor

    def go_on(self, step: int, done: float) -> None:
        """To be called when the optimizer was restored after so many steps."""
        self.last = self.full * self._share(max(0, step - 1), done)

    @contextmanager
    def applied(self, step: int, done: float) -> Iterator[None]:
        """Inside, the optimizer has the effective rate of this step.

        Args:
            done: the share of all epochs that is behind: not of steps, which other ranks may make other ones of.
        """
        groups, share = self._optimizer.param_groups, self._share(step, done)
        own = [group["lr"] for group in groups]
        self.last = self.full * share
        for group, lr in zip(groups, own, strict=True):
            group["lr"] = lr * self._factor * share
        try:
            yield
        finally:
            for group, lr in zip(groups, own, strict=True):
                group["lr"] = lr

    def _share(self, step: int, done: float) -> float:
        warmup = min(1.0, (step + 1) / (self._warmup_steps + 1))
        if self._decay == "none" or done <= self._begins:
            return warmup
        gone = min(1.0, (done - self._begins) / (1 - self._begins))
        return warmup * (1 - gone if self._decay == "linear" else (1 + math.cos(math.pi * gone)) / 2)


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


def count_warmup_steps(epochs: float, steps_per_epoch: int | None) -> int:
    """How many steps `epochs` of warm-up are.

    Raises:
        OptionError: the length of an epoch is not known.
    """
    if epochs == 0:
        return 0
    if steps_per_epoch is None:
        raise OptionError("--warmup-epochs needs a data set that knows its length; this one is a stream.")
    return max(1, round(epochs * steps_per_epoch))


def check_decay(decay: Decay, num_samples: int | None) -> None:
    """Refuses a decay of which nobody knows when it ends.

    Raises:
        OptionError: the length of an epoch is not known.
    """
    if decay != "none" and num_samples is None:
        raise OptionError("--lr-decay needs a data set that knows its length; this one is a stream.")
