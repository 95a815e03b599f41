"""Rows about callbacks, resuming, schedulers and signals."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau
from torch.utils.data import Dataset, TensorDataset

from benchmarks.idioms.idiom import Ema, Idiom


class CallbackWithState(Idiom):
    """After each epoch it halves the rate and adds the weights to a mean; at the half the training is resumed."""

    number, title = "11a", "a callback that changes the rate and keeps a mean of the weights; resumed"
    right = "as undisturbed in one process"
    resumes = True

    def prepare(self) -> None:
        self.state = Ema()

    def after_epoch(self, epoch: int) -> None:
        weights = torch.cat([p.detach().flatten() for p in self.model.parameters()])
        self.state.mean = 0.5 * self.state.mean + 0.5 * weights
        self.state.epochs += 1
        self.optimizer.param_groups[0]["lr"] *= 0.5

    def values(self) -> list[float]:
        return [*super().values(), *self.state.mean.tolist(), self.state.epochs, *self.rates[-1:]]


class Growing(Dataset[Any]):
    """A data set with an attribute that its samples depend on, such as an image's size."""

    def __init__(self, data: TensorDataset) -> None:
        self.data, self.scale = data, 1.0

    def __len__(self) -> int:
        return 12

    def __getitem__(self, number: int) -> Any:
        inputs, targets = self.data[number]
        return inputs * self.scale, targets


class CallbackChangesData(Idiom):
    """With a loader process that lives as long as the training."""

    number, title = "11b", "a callback changes an attribute of the data set, with a loader process"
    loader_processes = (1,)
    epochs = 2

    def make_data(self) -> Dataset[Any]:
        return Growing(super().make_data())

    def after_epoch(self, epoch: int) -> None:
        self.data.scale = 1.0 + epoch


class Folds(Idiom):
    """As k-fold validation does; the second model is compared with one that is trained alone."""

    number, title = "14", "train twice in a process"
    trainings = 2


class SlowToEvaluate(nn.Module):
    """A model that takes a quarter of a second for a batch of an evaluation, and says when one begins."""

    marker: Path

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.training:
            self.marker.touch()
            time.sleep(0.25)
        return self.layer(inputs)


class Terminated(Idiom):
    """An evaluation of 40 batches, which takes ten seconds."""

    number, title = "16", "a SIGTERM during an evaluation"
    right = "saved, and ended within 5 s"
    is_terminated = True

    def make_model(self) -> nn.Module:
        return SlowToEvaluate()

    def prepare(self) -> None:
        self.val_data = TensorDataset(torch.zeros(480, 2), torch.zeros(480, 1))

    def metric(self, outputs: Any, targets: Tensor) -> Tensor:
        return (outputs - targets).square().mean(1)


def one_cycle() -> tuple[float, ...]:
    """Return the rates of six steps."""
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    schedule, rates = OneCycleLR(optimizer, max_lr=0.1, total_steps=6), []
    for _ in range(6):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if len(rates) < 6:
            schedule.step()
    return tuple(rates)


class StepsOfOneCycle(Idiom):
    """Two steps in an epoch; the rate of each step is compared."""

    number, title = "S1", "OneCycleLR, stepped after each step"
    right = "its six rates"
    expected = one_cycle()
    batch = 6
    epochs = 3
    scheduler_step = "step"

    def scheduler(self, steps: int = 6) -> OneCycleLR:
        return OneCycleLR(self.optimizer, max_lr=0.1, total_steps=steps)

    def values(self) -> list[float]:
        return self.rates


class PlateauOfAccuracy(Idiom):
    """The accuracies of the shards differ; the rate of each step is compared."""

    number, title = "S2", 'ReduceLROnPlateau(mode="max") of the validation accuracy'
    right = "rates as in one process"
    epochs = 8
    scheduler_step = "metric"

    def make_data(self) -> Dataset[Any]:
        inputs = torch.randn(12, 2, generator=torch.Generator().manual_seed(3))
        return TensorDataset(inputs, (inputs.sum(1) > 0).long())

    def make_model(self) -> nn.Module:
        return nn.Linear(2, 2)

    def prepare(self) -> None:
        self.loss = nn.functional.cross_entropy
        inputs = torch.randn(12, 2, generator=torch.Generator().manual_seed(4))
        self.val_data = TensorDataset(inputs, (inputs.sum(1) + 0.3 > 0).long())

    def make_optimizer(self) -> Optimizer:
        return SGD(self.model.parameters(), lr=0.4)

    def scheduler(self) -> ReduceLROnPlateau:
        return ReduceLROnPlateau(self.optimizer, mode="max", patience=0, factor=0.5)

    def values(self) -> list[float]:
        return self.rates


ROWS = (CallbackWithState, CallbackChangesData, Folds, Terminated, StepsOfOneCycle, PlateauOfAccuracy)
