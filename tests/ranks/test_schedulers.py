"""Schedulers on several ranks: stepped by optimizer steps, one rate on all ranks, also after a resume."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from bit_jobs import MOMENTUM, cycle, scheduled
from combinations import case
from launchers import in_ranks
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from trainings import StoppedError, signs, train

from hvd_trainer import Callback, OptionError, RunView, detect

pytestmark = pytest.mark.warm

ENGINES = [case("ddp"), case("horovod")]
CYCLE = partial(scheduled, cycle, scheduler_step="step")


class Settings(Callback):
    """A callback that records the rate and the momentum of each step."""

    def __init__(self) -> None:
        self.of_steps: list[tuple[float, float]] = []

    def on_step_end(self, run: RunView, result: Any) -> None:
        self.of_steps.append((run.rate.last, run.optimizer.param_groups[0]["momentum"]))


def settings(backend: str, how: dict[str, Any], *callbacks: Callback, **options: Any) -> list[tuple[float, float]]:
    """Train; return the rate and the momentum of each step."""
    seen = Settings()
    train(backend, **{**how, "callbacks": [seen, *callbacks], **options})
    return seen.of_steps


def rates(backend: str, how: dict[str, Any], *callbacks: Callback, **options: Any) -> list[float]:
    return [rate for rate, _ in settings(backend, how, *callbacks, **options)]


def without_trainer() -> list[tuple[float, float]]:
    """Return the rate and the momentum of each step under `cycle`."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5, momentum=0.9)
    scheduler, group, of_steps = cycle(optimizer), optimizer.param_groups[0], []
    for _ in range(6):
        of_steps.append((group["lr"], group["momentum"]))
        optimizer.step()
        scheduler.step()
    return of_steps


CYCLED = [rate for rate, _ in without_trainer()]


def cycled(backend: str) -> list[tuple[float, float]]:
    return settings(backend, CYCLE())


@pytest.mark.parametrize("backend", ENGINES)
def test_steps_follow_the_schedule(backend: str) -> None:
    """Also the momentum, which is one step ahead of the rate: it is seen after the scheduler's."""
    for rank in in_ranks(3, cycled, backend):
        assert [rate for rate, _ in rank] == CYCLED
        assert [momentum for _, momentum in rank[:-1]] == [momentum for _, momentum in without_trainer()[1:]]


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


def follow_apart(backend: str) -> list[float]:
    """Train with a plateau that follows such a metric; return the rates of the steps."""
    Apart.sign = 1.0 if detect(os.environ).is_first else -1.0
    return rates(backend, scheduled(rising, scheduler_metric="val_apart", metrics={"apart": Apart()}))


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


def resumed_after_last_step(backend: str, folder: str) -> list[float]:
    options = {"epochs": 2, "accumulate": 1, "batch_size": 2, "global_batch_size": None, "save_every_steps": 1}
    how = CYCLE(train_data=Batches(), log_dir=folder, **options)
    rates(backend, how, StopAfterEpoch())
    return rates(backend, how, resume="auto")


@pytest.mark.parametrize("backend", ENGINES)
def test_resume_after_the_last_step_of_an_epoch(backend: str, tmp_path: Path) -> None:
    """The sample that is left over is no step."""
    assert in_ranks(2, resumed_after_last_step, backend, str(tmp_path)) == [CYCLED[3:]] * 2


@pytest.mark.parametrize("backend", ENGINES)
def test_all_ranks_train_at_one_rate(backend: str) -> None:
    """Each rank gave the scheduler what it had computed itself."""
    assert in_ranks(3, follow_apart, backend) == [[0.5] * 6] * 3


class Around(torch.optim.Optimizer):
    """An optimizer around another one, with its groups, and a state dict of its own, as Lookahead's usual code."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state

    def step(self, closure: Any = None) -> None:
        self.inner.step()

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.inner.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict["inner"])


def around(backend: str, folder: str) -> list[str]:
    """Train with an optimizer, and with one around it, undisturbed and in parts; return the weights of each."""
    how = {"optimizer": lambda parameters: Around(MOMENTUM(parameters))}
    train(backend, **CYCLE(**how, log_dir=folder, max_steps=3))
    jobs = [CYCLE(), CYCLE(**how), CYCLE(**how, log_dir=folder, resume="auto")]
    return [train(backend, **job).weights for job in jobs]


@pytest.mark.parametrize(("backend", "size"), [case("single", 1), case("ddp", 3), case("horovod", 3)])
def test_optimizer_around_another_follows_the_schedule(backend: str, size: int, tmp_path: Path) -> None:
    """The one within kept the rate of the start, and no checkpoint could be resumed."""
    weights = {digest for rank in in_ranks(size, around, backend, str(tmp_path)) for digest in rank}
    assert len(weights) == 1


def begin_cycle(backend: str, folder: str) -> list[float]:
    """Train with a cycle for two ranks, until the first step of the second epoch; return what is saved of it."""
    return rates(backend, of_ranks(folder), stop_after=4)[:3]


def end_cycle(backend: str, folder: str, **options: Any) -> Any:
    """Resume it."""
    try:
        return rates(backend, of_ranks(folder, **options), resume="auto")
    except OptionError as error:
        return str(error)


def of_ranks(folder: str, **options: Any) -> dict[str, Any]:
    usual = {"log_dir": folder, "save_every_steps": 1, "batch_size": 6, "global_batch_size": None}
    return CYCLE(**usual | options)


@pytest.mark.parametrize("backend", ENGINES)
def test_cycle_needs_the_same_steps_on_other_ranks(backend: str, tmp_path: Path) -> None:
    """One rank has twice as many: PyTorch's ValueError came after the step that was one too many."""
    args = (backend, str(tmp_path))
    first, _ = in_ranks(2, begin_cycle, *args)
    (refused,) = in_ranks(1, end_cycle, *args)
    # A step of two ranks was done in the second epoch: two of one rank are left, and four of the third epoch.
    assert "OneCycleLR(total_steps=6) is stepped 9 times until the end, once a step, 3 of them before" in refused
    assert "--global-batch-size for equal steps on any ranks" in refused
    (resumed,) = in_ranks(1, end_cycle, *args, batch_size=12, global_batch_size=24)
    assert first + resumed == CYCLED
