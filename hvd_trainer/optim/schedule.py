"""A user's learning-rate scheduler: when it is stepped, and which figure it follows."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

Scheduler = LRScheduler | Callable[[Optimizer], LRScheduler]
Interval = Literal["epoch", "step"]


class Schedule:
    """A scheduler, and when it is stepped.

    Args:
        scheduler: it, or a function that makes it from the optimizer; None: there is none.
        optimizer: whose rate it sets.
        interval: after each of these it is stepped.
        metric: the figure of epochs' records that it follows.
        default_metric: the figure, if it follows one and none is named.

    Attributes:
        scheduler: it, or whatever the function has returned.
        figure: of an epoch's record, with which it is stepped; empty: it follows none.
        is_by_steps: whether it is stepped after each optimizer step, and not after each epoch.
    """

    def __init__(
        self,
        scheduler: Any,
        optimizer: Optimizer,
        *,
        interval: Interval = "epoch",
        metric: str | None = None,
        default_metric: str = "train_loss",
    ) -> None:
        is_made = isinstance(scheduler, LRScheduler) or not callable(scheduler)
        self.scheduler: Any = scheduler if is_made else scheduler(optimizer)
        self.interval, self.metric = interval, metric
        self.is_by_steps = interval == "step"
        self.figure = (metric or default_metric) if needs_figure(self.scheduler) else ""

    def after_step(self, skipped: bool | Tensor) -> None:
        """Step the scheduler after an optimizer step, also after one that was skipped."""
        with warnings.catch_warnings():
            if skipped is True:
                # Without a step of the optimizer before, PyTorch warns that it is called in the wrong order.
                warnings.simplefilter("ignore", UserWarning)
            self.scheduler.step()

    def after_epoch(self, figures: Mapping[str, float]) -> None:
        """Step the scheduler, if there is one, after an epoch, with the figure that it follows."""
        if self.scheduler is not None:
            self.scheduler.step(*([figures[self.figure]] if self.figure else []))


def needs_figure(scheduler: Any) -> bool:
    """Return whether a scheduler's step must be given a value, as that of `ReduceLROnPlateau`."""
    if not isinstance(scheduler, LRScheduler):
        return False
    parameters = inspect.signature(scheduler.step).parameters.values()
    return any(one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD for one in parameters)
