"""Schedulers on several ranks: stepped by optimizer steps, one rate on all ranks, exact after a resume."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from combinations import case
from launchers import run_ranks
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, OneCycleLR, ReduceLROnPlateau, SequentialLR
from trainings import StopAfter, StoppedError, digest, options_of, signs

from hvd_trainer import Callback, OptionError, RunView, Trainer, accuracy, detect

pytestmark = pytest.mark.warm

ENGINES = [case("ddp"), case("horovod")]
NUM = 48
"""Samples: two steps of an epoch with two passes of twelve, of all ranks together."""


def cycle(optimizer: Any) -> Any:
    return OneCycleLR(optimizer, 0.5, total_steps=6)


def warm_cosine(optimizer: Any) -> Any:
    parts = [LinearLR(optimizer, total_iters=2), CosineAnnealingLR(optimizer, 4)]
    return SequentialLR(optimizer, parts, [2])


def plateau(optimizer: Any) -> Any:
    return ReduceLROnPlateau(optimizer, mode="max", patience=0, factor=0.5, threshold=1.0)


SCHEDULERS: dict[str, dict[str, Any]] = {
    "cycle": {"scheduler": cycle, "scheduler_step": "step"},
    "warm cosine": {"scheduler": warm_cosine, "scheduler_step": "step"},
    "plateau": {"scheduler": plateau, "scheduler_metric": "val_accuracy"},
}


class Settings(Callback):
    """A callback that records the rate and the momentum of each step."""

    def __init__(self) -> None:
        self.of_steps: list[tuple[float, float]] = []

    def on_step_end(self, run: RunView, result: Any) -> None:
        self.of_steps.append((run.rate.last, run.optimizer.param_groups[0]["momentum"]))


def train(backend: str, how: Any, stop_after: int | None = None, **options: Any) -> dict[str, Any]:
    """Train three epochs with a scheduler, until a step or the end; return what this rank then has."""
    options = {"epochs": 3, "accumulate": 2, "global_batch_size": 24, **options}
    with Trainer(options_of(backend, **options)) as trainer:
        model = nn.Linear(6, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        settings, scheduler = Settings(), how["scheduler"](optimizer)
        callbacks = [settings, StopAfter(stop_after)]
        how = {"metrics": {"accuracy": accuracy}, "callbacks": callbacks, **how, "scheduler": scheduler}
        how = {"train_data": signs(NUM), "val_data": signs(16), **how}
        with suppress(StoppedError):
            trainer.fit(model, optimizer, nn.functional.cross_entropy, **how)
        rank = trainer.world.rank
    return {
        "rank": rank,
        "weights": digest(model.state_dict()),
        "settings": settings.of_steps,
        "scheduler": str(scheduler.state_dict()),
    }


def whole_and_resumed(backend: str, folder: str) -> tuple[int, Any]:
    """Train with each scheduler, undisturbed, and stopped after the first step of the second epoch."""
    runs = {}
    for name, how in SCHEDULERS.items():
        options = {"log_dir": f"{folder}/{name}", "save_every_steps": 1}
        first = train(backend, how, stop_after=4, **options)
        runs[name] = train(backend, how), first, train(backend, how, resume="auto", **options)
    return runs["cycle"][0]["rank"], runs


def without_trainer() -> list[tuple[float, float]]:
    """Return the rate and the momentum of each step under `cycle`."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5, momentum=0.9)
    scheduler, group, of_steps = cycle(optimizer), optimizer.param_groups[0], []
    for _ in range(6):
        of_steps.append((group["lr"], group["momentum"]))
        optimizer.step()
        scheduler.step()
    return of_steps


@pytest.mark.parametrize("backend", ENGINES)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_resume_inside_an_epoch_continues_the_schedule(backend: str, size: int, tmp_path: Path) -> None:
    """Also the momentum, which is one step ahead of the rate: it is seen after the scheduler's."""
    ranks = run_ranks(whole_and_resumed, num_processes=size, args=(backend, str(tmp_path)))
    cycled = without_trainer()
    for rank in ranks:
        for name, (whole, first, resumed) in rank.items():
            assert whole["weights"] == resumed["weights"] == ranks[0][name][0]["weights"], name
            assert whole["scheduler"] == resumed["scheduler"], name
            # The third step is the last one that is saved.
            assert first["settings"][:3] + resumed["settings"] == whole["settings"], name
        rates, momentums = zip(*rank["cycle"][0]["settings"], strict=True)
        assert list(rates) == [rate for rate, _ in cycled]
        assert list(momentums[:-1]) == [momentum for _, momentum in cycled[1:]]


class Apart:
    """A metric of which each rank computes another value, best on rank 0: as processors of several kinds do."""

    sign = 1.0

    def __init__(self) -> None:
        self.passes = 0

    def update(self, outputs: Any, targets: Any) -> None: ...

    def merge_state(self, other: Apart) -> None: ...

    def reset(self) -> None:
        self.passes += 1

    def compute(self) -> float:
        return self.sign * self.passes


def follow_apart(backend: str) -> tuple[int, list[float]]:
    """Train with a plateau that follows such a metric; return the rates of the steps."""
    Apart.sign = 1.0 if detect(os.environ).is_first else -1.0
    how = {"scheduler": rising, "scheduler_metric": "val_apart", "metrics": {"apart": Apart()}}
    run = train(backend, how)
    return run["rank"], [rate for rate, _ in run["settings"]]


def rising(optimizer: Any) -> Any:
    return ReduceLROnPlateau(optimizer, mode="max", patience=0)


class Batches:
    """A source of batches of two for each shard, and of a sample that is left over."""

    def __len__(self) -> int:
        return 13

    def batches(self, shard: Any, epoch: int | None) -> Any:
        inputs, targets = (
            signs(12).inputs[shard.number :: shard.size],
            signs(12).targets[shard.number :: shard.size],
        )
        yield from zip(inputs.split(2), targets.split(2), strict=True)


class StopAfterEpoch(Callback):
    """A callback that ends a run after the last step of an epoch was saved, and before the epoch is."""

    def on_epoch_end(self, run: RunView, record: dict[str, Any]) -> None:
        raise StoppedError


def resumed_after_last_step(backend: str, folder: str) -> tuple[int, Any]:
    options = {"epochs": 2, "accumulate": 1, "batch_size": 2, "global_batch_size": None, "save_every_steps": 1}
    how = {**SCHEDULERS["cycle"], "train_data": Batches()}
    first = train(backend, {**how, "callbacks": [StopAfterEpoch()]}, **options, log_dir=folder)
    run = train(backend, how, **options, log_dir=folder, resume="auto")
    return first["rank"], [rate for rate, _ in run["settings"]]


@pytest.mark.parametrize("backend", ENGINES)
def test_resume_after_the_last_step_of_an_epoch(backend: str, tmp_path: Path) -> None:
    """The sample that is left over is no step."""
    for rates in run_ranks(resumed_after_last_step, num_processes=2, args=(backend, str(tmp_path))):
        assert rates == [rate for rate, _ in without_trainer()][3:]


@pytest.mark.parametrize("backend", ENGINES)
def test_all_ranks_train_at_one_rate(backend: str) -> None:
    """Each rank gave the scheduler what it had computed itself."""
    for rates in run_ranks(follow_apart, num_processes=3, args=(backend,)):
        assert rates == [0.5] * 6


def begin_cycle(backend: str, folder: str) -> tuple[int, Any]:
    """Train with a cycle for two ranks, until the first step of the second epoch."""
    run = train(backend, SCHEDULERS["cycle"], stop_after=4, **of_ranks(folder))
    return run["rank"], run["settings"][:3]


def end_cycle(backend: str, folder: str, **options: Any) -> tuple[int, Any]:
    """Resume it."""
    try:
        run = train(backend, SCHEDULERS["cycle"], **{**of_ranks(folder), **options}, resume="auto")
    except OptionError as error:
        return 0, str(error)
    return run["rank"], run["settings"]


def of_ranks(folder: str) -> dict[str, Any]:
    return {"log_dir": folder, "save_every_steps": 1, "batch_size": 6, "global_batch_size": None}


@pytest.mark.parametrize("backend", ENGINES)
def test_cycle_needs_the_same_steps_on_other_ranks(backend: str, tmp_path: Path) -> None:
    """One rank has twice as many: PyTorch's ValueError came after the step that was one too many."""
    args = (backend, str(tmp_path))
    (first, _) = run_ranks(begin_cycle, num_processes=2, args=args)
    (refused,) = run_ranks(end_cycle, num_processes=1, args=args)
    # A step of two ranks was done in the second epoch: two of one rank are left, and four of the third epoch.
    assert "OneCycleLR(total_steps=6) is stepped 9 times until the end, once a step, 3 of them before" in refused
    assert "--global-batch-size for equal steps on any ranks" in refused
    same = {"batch_size": 12, "global_batch_size": 24}
    (resumed,) = run_ranks(end_cycle, num_processes=1, args=args, kwargs=same)
    assert [rate for rate, _ in first + resumed] == [rate for rate, _ in without_trainer()]
