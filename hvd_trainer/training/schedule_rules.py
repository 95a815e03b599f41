"""Which schedulers do not go with a training: with its optimizer and figures, or with its number of steps.

A scheduler of PyTorch's counts its calls, and its length says for how many it is made. Lengths that are certainly
wrong are refused: OneCycleLR's, if it is not that of the training, and any that counts steps where the scheduler
is stepped by epochs, or the reverse. Another schedule may be longer or shorter than the training.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    PolynomialLR,
    SequentialLR,
)

from hvd_trainer.config.options import TrainOptions
from hvd_trainer.observe.metrics import Metric, accuracy
from hvd_trainer.optim.schedule import Interval, Schedule
from hvd_trainer.utils.text import plural

LENGTHS: Mapping[type[LRScheduler], str] = {
    OneCycleLR: "total_steps",
    CosineAnnealingLR: "T_max",
    CosineAnnealingWarmRestarts: "T_0",
    PolynomialLR: "total_iters",
    LinearLR: "total_iters",
    ConstantLR: "total_iters",
}
"""The argument, and attribute, that says for how many calls a scheduler is made."""


def schedule_mistakes(
    schedule: Schedule,
    optimizer: Optimizer,
    train: TrainOptions,
    metrics: Mapping[str, Metric],
    figures: Collection[str],
    *,
    steps_may_change: bool = False,
) -> Iterator[str]:
    """Yield a message for each argument of `fit` on the scheduler that does not go with the rest.

    Args:
        metrics: those of `fit`.
        figures: those that epochs' records will have.
        steps_may_change: whether ranks may come and go, and an epoch then has other steps.
    """
    scheduler, kind = schedule.scheduler, type(schedule.scheduler).__name__
    if schedule.interval not in get_args(Interval):
        yield f'scheduler_step={schedule.interval!r}: a scheduler is stepped after each "epoch", or each "step"'
    if scheduler is None:
        if schedule.interval != "epoch" or schedule.metric is not None:
            yield "fit has no scheduler: give it one, or leave out scheduler_step and scheduler_metric"
        return
    if not isinstance(scheduler, LRScheduler):
        yield f"scheduler= takes one of torch.optim.lr_scheduler, or a function that makes one, and not {kind}"
        return
    own = set(map(id, optimizer.param_groups))
    if own.isdisjoint(map(id, getattr(scheduler, "optimizer", optimizer).param_groups)):
        yield f"{kind} sets the rate of another optimizer: make it from the one that fit is given"
    if any(isinstance(part.scheduler, OneCycleLR) for part in parts(scheduler)):
        if train.warmup_epochs > 0 or train.lr_decay != "none":
            yield "OneCycleLR warms up and decays by itself: leave out --warmup-epochs and --lr-decay"
        if steps_may_change and schedule.interval == "step":
            yield "OneCycleLR needs as many steps on any ranks, which come and go here: add --global-batch-size"
    if schedule.figure:
        yield from _figure_mistakes(schedule, metrics, figures)
    elif schedule.metric is not None:
        yield f'{kind} follows no figure: leave out scheduler_metric="{schedule.metric}"'


def _figure_mistakes(schedule: Schedule, metrics: Mapping[str, Metric], figures: Collection[str]) -> Iterator[str]:
    """Yield a message for each mistake in the figure that a scheduler follows."""
    kind, figure = type(schedule.scheduler).__name__, schedule.figure
    if schedule.interval == "step":
        yield f'{kind} follows {figure}, of which each epoch has one: leave out scheduler_step="step"'
    if figure not in figures:
        yield f'scheduler_metric="{figure}": this job has no {figure}, but {", ".join(sorted(figures))}'
        return
    mode, best = getattr(schedule.scheduler, "mode", None), _best(figure, metrics)
    if {mode, best} == {"min", "max"}:
        others = [other for other in figures if _best(other, metrics) in (mode, None)]
        name = f'name another figure, such as scheduler_metric="{others[-1]}", or ' if others else ""
        yield (
            f'{kind}(mode="{mode}") follows {figure}, which is best at its {best}imum: {name}type mode="{best}"'
        )


def _best(figure: str, metrics: Mapping[str, Metric]) -> str | None:
    """Return whether the `min` or the `max` of a figure is best; None if that is not known."""
    name = figure.partition("_")[2]
    metric = metrics.get(name)
    is_high = True if metric is accuracy else getattr(metric, "higher_is_better", None)  # torchmetrics' has it
    if name == "loss" or is_high is False:
        return "min"
    return "max" if is_high else None


@dataclass(frozen=True)
class Part:
    """A scheduler among those that a training's scheduler is made of."""

    scheduler: Any
    start: int = 0
    """calls of the whole before its first"""
    stop: float = math.inf
    """calls of the whole when the next one takes its place"""

    @property
    def argument(self) -> str:
        """The argument for its length; empty if it has none."""
        return next((name for kind, name in LENGTHS.items() if isinstance(self.scheduler, kind)), "")

    @property
    def length(self) -> int:
        """The number of calls for which it is made."""
        return int(getattr(self.scheduler, self.argument))

    def calls(self, of_whole: int) -> int:
        """Return how often it has been called when the whole has been a number of times."""
        return max(0, int(min(of_whole, self.stop - 1)) - self.start)

    def __str__(self) -> str:
        return f"{type(self.scheduler).__name__}({self.argument}={self.length})"


def parts(scheduler: Any, start: int = 0, stop: float = math.inf) -> Iterator[Part]:
    """Yield all that a scheduler is made of: itself, unless it calls others together or one after the other."""
    if isinstance(scheduler, SequentialLR):
        milestones = [0, *scheduler._milestones, math.inf]
        for part, begin, end in zip(scheduler._schedulers, milestones, milestones[1:], strict=False):
            yield from parts(part, start + int(begin), min(stop, start + end))
    elif isinstance(scheduler, ChainedScheduler):
        for part in scheduler._schedulers:
            yield from parts(part, start, stop)
    else:
        yield Part(scheduler, start, stop)


def calls_of(scheduler: Any) -> int:
    """Return how often a scheduler has been called."""
    chained = isinstance(scheduler, ChainedScheduler)
    return calls_of(scheduler._schedulers[0]) if chained else int(scheduler.last_epoch)


@dataclass(frozen=True, kw_only=True)
class Length:
    """How long a training is, and what is left of it."""

    epochs: int
    epochs_left: int
    steps_per_epoch: int | None = None
    """None for a stream, and for batches of a sampler: other epochs may have more"""
    steps_left: int = 0
    """until the end of the last epoch"""
    max_steps_left: int | None = None
    """until --max-steps; None: that is not given"""
    batches_per_epoch: int = 0
    """those of one process that trains alone, which are easily taken for the steps"""

    def calls_left(self, interval: Interval) -> int | None:
        """Return how often a scheduler will be stepped; None if that is not known."""
        of_epoch, limit = self.steps_per_epoch, self.max_steps_left
        if of_epoch is None:
            return self.epochs_left if interval == "epoch" and limit is None else None
        steps = self.steps_left if limit is None else min(self.steps_left, limit)
        done = self.epochs_left * of_epoch - self.steps_left
        return steps if interval == "step" else (done + steps) // of_epoch


def length_mistakes(schedule: Schedule, length: Length) -> Iterator[str]:
    """Yield a message for each scheduler whose length is certainly not that of the training."""
    if schedule.scheduler is None:
        return
    done, left = calls_of(schedule.scheduler), length.calls_left(schedule.interval)
    for part in parts(schedule.scheduler):
        if part.argument and left is not None:
            calls = part.calls(done + left)
            is_last, is_whole = part.stop == math.inf, length.max_steps_left is None
            ends_early = calls < part.length - 1 and is_last and is_whole
            wrong = isinstance(part.scheduler, OneCycleLR) and (calls > part.length or ends_early)
            # What a checkpoint has brought was right, or was refused, when its run began.
            if wrong or (not done and _counts_otherwise(part, schedule.interval, length)):
                yield _correction(part, schedule.interval, length, done, calls)


def _counts_otherwise(part: Part, interval: Interval, length: Length) -> bool:
    """Return whether a scheduler counts steps and is stepped by epochs, or the reverse."""
    end, epochs, steps = part.start + part.length, length.epochs, length.steps_per_epoch
    if steps is None:
        return False
    if interval == "epoch":
        return end in {epochs * steps, epochs * length.batches_per_epoch} - {epochs}
    # A warm-up may take as many steps as a training has epochs.
    return end == epochs != epochs * steps and not isinstance(part.scheduler, LinearLR | ConstantLR)


def _correction(part: Part, interval: Interval, length: Length, done: int, calls: int) -> str:
    """Return the message for a scheduler of a wrong length.

    Args:
        done: calls before this training, or before it was resumed.
        calls: of this part at the end.
    """
    unit = "an epoch" if interval == "epoch" else "a step"
    text = f"{part} is stepped {plural(calls, 'time')} until the end, once {unit}"
    if done:
        before = part.calls(done)
        return (
            f"{text}, {before:,} of them before now. Give the options of its run: --epochs, and "
            f"--global-batch-size for equal steps on any ranks. Or begin another for the rest: {part.argument}="
            f"{calls - before} and --resume-partial scheduler"
        )
    ways = [f"{part.argument}={calls}"] if calls else []
    if interval == "step" and part.start + part.length == length.epochs:
        ways.append('leave out scheduler_step="step"')
    if interval == "epoch" and length.steps_per_epoch is not None:
        steps = part.calls(length.epochs * length.steps_per_epoch)
        ways.insert(0, f'scheduler_step="step"{"" if steps == part.length else f" and {part.argument}={steps}"}')
    short = "; for a short run keep --epochs, and add --max-steps" if part.length > calls else ""
    return f"{text}: type {', or '.join(ways)}{short}"
