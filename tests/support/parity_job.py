"""A job for test_parity_tool.py with a mistake on one engine, such as FAULT="ddp: scaled rate"."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from hvd_trainer import Trainer, TrainerOptions, run_job
from hvd_trainer.backends.ddp import BUFFERS_IN_FORWARD

SAMPLES = 304  # of a step 64: four steps and one of 48 in an epoch


@dataclass(frozen=True)
class NormOptions:
    """The normalisation of the model."""

    batch_norm: bool = False
    """whether the model has batch norm"""


@dataclass(frozen=True)
class Options(TrainerOptions):
    """Train a few layers on random points."""

    norm: NormOptions = field(default_factory=NormOptions)


class Points(Dataset[tuple[Tensor, Tensor]]):
    """Points in four clusters. With `counts` it returns them in turn, whatever index it is asked for."""

    def __init__(self, counts: bool = False) -> None:
        generator = torch.Generator().manual_seed(1)
        self._targets = torch.randint(0, 4, (SAMPLES,), generator=generator)
        self._inputs = torch.randn(SAMPLES, 8, generator=generator) + self._targets.view(-1, 1)
        self._counts, self._next = counts, 0

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self._next += 1
        place = self._next % SAMPLES if self._counts else index
        return self._inputs[place], self._targets[place]


def train(options: Options) -> None:
    """Train with the mistake on the engine that shall have it."""
    engine, _, fault = os.environ.get("FAULT", "").partition(": ")
    fault = fault if engine == options.engine.backend else ""
    with Trainer(options) as trainer:
        if fault == "other start":
            torch.rand(1)
        norm = nn.BatchNorm1d(16) if options.norm.batch_norm else nn.Identity()
        model = nn.Sequential(nn.Linear(8, 16), norm, nn.Tanh(), nn.Linear(16, 4))
        lr = 0.05 * (trainer.world.size if fault == "scaled rate" else 1)
        optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9, weight_decay=0.01)
        if fault == "fake step":
            import horovod.torch as hvd

            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        plant(fault, trainer.backend)
        data = Points(counts=fault == "wrong shard")
        trainer.fit(model, optimizer, nn.functional.cross_entropy, data, Points())


def plant(fault: str, backend: Any) -> None:
    """Plant a mistake inside the engine."""
    prepare = backend.prepare

    def sending(model: nn.Module, optimizer: torch.optim.Optimizer, exchange: bool) -> Any:
        prepared = prepare(model, optimizer, exchange=exchange)
        setattr(prepared[0], BUFFERS_IN_FORWARD, True)
        return prepared

    if fault == "sent buffers":
        backend.prepare = sending


if __name__ == "__main__":
    run_job(Options, train)
