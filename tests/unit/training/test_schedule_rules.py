"""Schedulers: when they are stepped, which figure they follow, and which are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as torch_schedulers
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    PolynomialLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler
from trainings import fit, options_of, signs

from hvd_trainer import Callback, CheckpointError, History, OptionError, RunView, TensorData, accuracy
from hvd_trainer.config.options import TrainOptions
from hvd_trainer.optim.schedule import Schedule
from hvd_trainer.training.schedule_rules import LENGTHS, Length, parts, schedule_mistakes

Make = Callable[[Any], LRScheduler]
NUM = 40
"""Samples: ten steps of an epoch, if batches have four."""


def cycle(total_steps: int, **how: Any) -> Make:
    return lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps, **how)


def cosine(period: int) -> Make:
    return lambda optimizer: CosineAnnealingLR(optimizer, period)


def train(make: Any, data: Any = None, how: dict[str, Any] | None = None, **options: Any) -> History:
    """Train three epochs with a scheduler; `how` has further arguments of `fit`."""
    model = nn.Linear(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    how = {"metrics": {"accuracy": accuracy}, "optimizer": optimizer, "scheduler": make, **(how or {})}
    data = signs(NUM) if data is None else data
    return fit(options_of(**{"epochs": 3, "batch_size": 4, **options}), model, data, signs(8), **how)


class Rates(Callback):
    """A callback that records the rate of each step."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_step_end(self, run: RunView, result: Any) -> None:
        self.rates.append(run.rate.last)


def rates_of(make: Make, calls: int) -> list[float]:
    """Return the rates of steps between which a scheduler is called, without the trainer."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
    scheduler, rates = make(optimizer), []
    for _ in range(calls):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return rates


def in_turn(first: int, second: Make) -> Make:
    """Return what makes a warm-up, and then another scheduler."""
    return lambda o: SequentialLR(o, [LinearLR(o, total_iters=first), second(o)], [first])


BY_STEP = {"scheduler_step": "step"}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "make",
    [
        cycle(15),
        in_turn(5, cycle(10)),
        in_turn(5, cosine(10)),
        lambda o: ChainedScheduler([LinearLR(o, total_iters=15), StepLR(o, 4)], optimizer=o),
    ],
)
def test_steps_are_those_of_the_optimizer(make: Make) -> None:
    """All schedulers were stepped by epochs: a cycle of as many steps ended at 0.879 of its peak."""
    rates = Rates()
    train(make, how={**BY_STEP, "callbacks": [rates]}, accumulate=2)
    assert rates.rates == rates_of(make, 15)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_skipped_steps_count(precision: str) -> None:
    """PyTorch warned of a wrong order, if the first step was skipped."""
    inputs = signs(NUM).inputs
    inputs[:] = torch.inf
    inputs[4:] = signs(NUM).inputs[4:]
    rates = Rates()
    loader = DataLoader(TensorData(inputs, signs(NUM).targets), batch_size=4)
    how = {**BY_STEP, "callbacks": [rates]}
    history = train(cycle(30), loader, how, non_finite="skip", precision=precision)
    assert history.end["skipped_steps"] >= 3
    assert rates.rates == rates_of(cycle(30), 30)


def test_plateau_follows_the_figure_that_is_named() -> None:
    """With mode="max" it was given the loss, and the rate fell although the accuracy rose."""
    make: Make = lambda o: ReduceLROnPlateau(o, mode="max", patience=0, factor=0.5)  # noqa: E731
    history = train(make, how={"scheduler_metric": "val_accuracy"}, epochs=5)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler: Any = make(optimizer)
    for record in history:
        assert record["lr"] == optimizer.param_groups[0]["lr"]
        scheduler.step(record["val_accuracy"])


class Error(nn.Module):
    """A metric that says, as torchmetrics' do, that it is best when it is lowest."""

    higher_is_better = False

    def forward(self, outputs: Any, targets: Any) -> Any:
        return ~accuracy(outputs, targets)


MAX: Make = lambda o: ReduceLROnPlateau(o, mode="max")  # noqa: E731


@pytest.mark.parametrize(
    ("make", "how", "refused"),
    [
        (
            MAX,
            {},
            "follows val_loss, which is best at its minimum: name another figure, such as scheduler_metric=",
        ),
        (MAX, {"scheduler_metric": "val_accuracy"}, ""),
        (MAX, {"scheduler_metric": "val_error", "metrics": {"error": Error()}}, 'type mode="min"'),
        (ReduceLROnPlateau, {}, ""),
        (ReduceLROnPlateau, {"scheduler_metric": "val_accuracy"}, 'is best at its maximum: .* type mode="max"'),
        (ReduceLROnPlateau, {"scheduler_metric": "val_error", "metrics": {"error": Error()}}, ""),
        (ReduceLROnPlateau, {"scheduler_metric": "val_acc"}, "this job has no val_acc, but train_accuracy, "),
        (ReduceLROnPlateau, BY_STEP, 'val_loss, of which each epoch has one: leave out scheduler_step="step"'),
        (lambda o: StepLR(o, 1), {"scheduler_metric": "val_loss"}, "StepLR follows no figure: leave out"),
        (lambda o: StepLR(o, 1), {"scheduler_step": "batch"}, 'is stepped after each "epoch", or each "step"'),
        (None, BY_STEP, "fit has no scheduler"),
        (None, {"scheduler_metric": "val_loss"}, "fit has no scheduler"),
        (3, {}, "takes one of torch.optim.lr_scheduler, or a function that makes one, and not int"),
        (lambda o: print, {}, "and not builtin_function_or_method"),
        (StepLR(torch.optim.SGD([torch.zeros(1)]), 1), {}, "sets the rate of another optimizer"),
    ],
)
def test_arguments_that_do_not_go_together(make: Any, how: dict[str, Any], refused: str) -> None:
    if not refused:
        assert len(train(make, how=how, epochs=1)) == 1
        return
    with pytest.raises(OptionError, match=refused):
        train(make, how=how)


def test_cycle_has_a_warmup_and_a_decay() -> None:
    for curve in ({"warmup_epochs": 0.5}, {"lr_decay": "cosine"}):
        with pytest.raises(
            OptionError, match="OneCycleLR warms up and decays by itself: leave out --warmup-epochs"
        ):
            train(cycle(30), how=BY_STEP, **curve)


def test_cycle_in_elastic_mode_needs_a_global_batch() -> None:
    """Another number of ranks would have another number of steps."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
    for interval, may_change, refused in (("step", True, 1), ("step", False, 0), ("epoch", True, 0)):
        schedule = Schedule(cycle(6), optimizer, interval=interval)  # type: ignore[arg-type]
        rest: Any = TrainOptions(), {}, ["train_loss"]
        mistakes = list(schedule_mistakes(schedule, optimizer, *rest, steps_may_change=may_change))
        assert len(mistakes) == refused
        assert not refused or "add --global-batch-size" in mistakes[0]


EPOCHS = {"epochs": 3, "epochs_left": 3}


@pytest.mark.parametrize(
    ("make", "how", "options", "refused"),
    [
        (cycle(30), {}, {}, r'stepped 3 times .* an epoch: type scheduler_step="step", or total_steps=3; for'),
        (cycle(3), {}, {}, ""),
        (cycle(30), BY_STEP, {}, ""),
        (cycle(31), BY_STEP, {}, ""),
        (cycle(3), BY_STEP, {}, 'stepped 30 times .* total_steps=30, or leave out scheduler_step="step"$'),
        (cycle(30), BY_STEP, {"accumulate": 2}, "stepped 15 times .* once a step: type total_steps=15; for a"),
        (cycle(300), BY_STEP, {}, "total_steps=30; for a short run keep --epochs, and add --max-steps"),
        (cycle(300), BY_STEP, {"max_steps": 5}, ""),
        (cycle(4), BY_STEP, {"max_steps": 5}, "is stepped 5 times"),
        (in_turn(5, cycle(24)), BY_STEP, {}, r"OneCycleLR\(total_steps=24\) is stepped 25 times"),
        (cosine(30), {}, {}, r'LR\(T_max=30\) .* scheduler_step="step", or T_max=3'),
        # Batches of a process that trains alone.
        (cosine(30), {}, {"accumulate": 2}, '_step="step" and T_max=15, or T_max=3'),
        (in_turn(5, cosine(25)), {}, {}, '0 times .* type scheduler_step="step";'),
        (lambda o: ChainedScheduler([PolynomialLR(o, 30)], optimizer=o), {}, {}, r"PolynomialLR\(total_it"),
        (cosine(3), BY_STEP, {}, 'T_max=30, or leave out scheduler_step="step"'),
        (lambda o: CosineAnnealingWarmRestarts(o, 30), {}, {}, "T_0=30"),
        # Longer or shorter than the training, which may be meant.
        (cosine(50), {}, {}, ""),
        (cosine(2), {}, {}, ""),
        (cosine(300), BY_STEP, {}, ""),
        (lambda o: LinearLR(o, total_iters=3), BY_STEP, {}, ""),
        (lambda o: ConstantLR(o, total_iters=3), BY_STEP, {}, ""),
        (cosine(3), BY_STEP, {"batch_size": NUM}, ""),
    ],
)  # fmt: skip
def test_lengths_that_count_something_else(
    make: Make, how: dict[str, Any], options: dict[str, Any], refused: str
) -> None:
    """All of these trained to the end, at other rates than were asked for."""
    if not refused:
        assert len(train(make, how=how, **options)) == (1 if "max_steps" in options else 3)
        return
    with pytest.raises(OptionError, match=refused):
        train(make, how=how, **options)


class Buckets(BatchSampler):
    """Batches of a sampler, which may make more of them in another epoch."""


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield from zip(signs(NUM).inputs, signs(NUM).targets, strict=True)


def test_unknown_lengths_are_not_refused() -> None:
    """Of an epoch's steps nobody knows how many there will be."""
    sampler: Any = Buckets(SequentialSampler(range(NUM)), 4, False)
    for data in (Stream(), DataLoader(signs(NUM), batch_sampler=sampler)):
        assert len(train(cycle(40), data, BY_STEP)) == 3


def test_length_of_a_data_loader() -> None:
    loader = DataLoader(signs(NUM), batch_size=8, shuffle=True)
    assert len(train(cycle(15), loader, BY_STEP, batch_size=8)) == 3
    with pytest.raises(OptionError, match="stepped 9 times until the end"):
        train(cycle(15), loader, BY_STEP, batch_size=8, accumulate=2)


def test_calls_that_are_left() -> None:
    assert [Length(**EPOCHS).calls_left(unit) for unit in ("epoch", "step")] == [3, None]
    assert Length(**EPOCHS, max_steps_left=7).calls_left("epoch") is None
    # In the second of three epochs of ten steps, after four of its steps.
    inside = {"epochs": 3, "epochs_left": 2, "steps_per_epoch": 10, "steps_left": 16}
    assert [Length(**inside).calls_left(unit) for unit in ("epoch", "step")] == [2, 16]
    for limit, epochs in ((5, 0), (6, 1), (15, 1), (16, 2), (99, 2)):
        length = Length(**inside, max_steps_left=limit)
        assert [length.calls_left(unit) for unit in ("epoch", "step")] == [epochs, min(limit, 16)]


def test_every_length_of_pytorch_is_known() -> None:
    """A scheduler that PyTorch adds, and that has one, is to be put into the table."""
    without = {
        *("LambdaLR", "MultiplicativeLR", "StepLR", "MultiStepLR", "ExponentialLR", "CyclicLR", "_LRScheduler")
    }
    of_others = {"SequentialLR", "ChainedScheduler", "ReduceLROnPlateau"}
    kinds = {one.__name__ for one in LRScheduler.__subclasses__() if one.__module__ == torch_schedulers.__name__}
    assert {kind.__name__ for kind in LENGTHS} == kinds - without - of_others


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step:UserWarning")
def test_parts_one_after_the_other() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    inner = in_turn(2, cosine(6))(optimizer)
    whole = SequentialLR(optimizer, [inner, ConstantLR(optimizer)], [8])
    stages = [(part.start, part.stop, part.calls(20)) for part in parts(whole)]
    assert stages == [(0, 2, 1), (2, 8, 5), (8, float("inf"), 12)]


def stop_after_epochs(folder: Path, epochs: int, make: Make, how: dict[str, Any], **options: Any) -> list[float]:
    """Train, or resume, in a folder; return the rates of the steps."""
    rates = Rates()
    train(make, how={**how, "callbacks": [rates]}, epochs=epochs, log_dir=str(folder), resume="auto", **options)
    return rates.rates


def test_longer_training_needs_another_cycle(tmp_path: Path) -> None:
    """The restored one was at its end: PyTorch's ValueError came after the first step of the next epoch."""
    assert stop_after_epochs(tmp_path, 2, cycle(20), BY_STEP) == rates_of(cycle(20), 20)
    with pytest.raises(OptionError, match=r"30 times .*, 20 of them before now.*total_steps=10 and --resume-p"):
        stop_after_epochs(tmp_path, 3, cycle(30), BY_STEP)
    # All that it has put into the optimizer is its own, and not the checkpoint's.
    other: Make = lambda o: OneCycleLR(o, 0.7, 10, base_momentum=0.5)  # noqa: E731
    assert stop_after_epochs(tmp_path, 3, other, BY_STEP, resume_partial=("scheduler",)) == rates_of(other, 10)


def test_resumed_scheduler_counts_what_it_counted(tmp_path: Path) -> None:
    make: Make = lambda o: StepLR(o, 7)  # noqa: E731
    stop_after_epochs(tmp_path, 2, make, BY_STEP)
    with pytest.raises(CheckpointError, match=r"its scheduler is StepLR by steps, not StepLR \(to reset it: "):
        stop_after_epochs(tmp_path, 3, make, {})
