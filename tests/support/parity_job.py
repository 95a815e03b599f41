"""A job with a mistake on one engine, which `python -m hvd_trainer parity` must find: see test_parity_tool.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from hvd_trainer import RunView, Trainer, TrainerOptions, run_job
from hvd_trainer.backends.ddp import BUFFERS_IN_FORWARD
from hvd_trainer.observe.callback import Callback

SAMPLES = 304  # of a step 64: four steps and one of 48 in an epoch


@dataclass(frozen=True)
class FaultOptions:
    """The planted mistake and where it is."""

    fault: str = "none"
    """which mistake; none by itself"""
    on: str = "horovod"
    """the engine that has it"""
    batch_norm: bool = False
    """whether the model has batch norm"""


@dataclass(frozen=True)
class Options(TrainerOptions):
    """Train a few layers on random points."""

    wrong: FaultOptions = field(default_factory=FaultOptions)


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
    fault = options.wrong.fault if options.engine.backend == options.wrong.on else "none"
    with Trainer(options) as trainer:
        if fault == "other start":
            torch.rand(1)
        norm = nn.BatchNorm1d(16) if options.wrong.batch_norm else nn.Identity()
        model = nn.Sequential(nn.Linear(8, 16), norm, nn.Tanh(), nn.Linear(16, 4))
        lr = 0.05 * (trainer.world.size if fault == "scaled rate" else 1)
        optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9, weight_decay=0.01)
        if fault == "fake step":
            import horovod.torch as hvd

            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        if fault == "crash":
            raise RuntimeError("a mistake in the job")
        plant(fault, trainer)
        callbacks = [OneRank()] if fault == "one rank" else []
        data = Points(counts=fault == "wrong shard")
        trainer.fit(model, optimizer, nn.functional.cross_entropy, data, Points(), callbacks=callbacks)


def plant(fault: str, trainer: Trainer) -> None:
    """Plant a mistake inside the engine."""
    backend: Any = trainer.backend
    finish, prepare = backend._finish_exchange, backend.prepare

    def summed(optimizer: torch.optim.Optimizer) -> None:
        finish(optimizer)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(trainer.world.size)

    if fault == "buffers":
        backend.average_buffers = lambda model: None
    elif fault == "no average":
        backend.prepare = lambda model, optimizer, exchange: prepare(model, optimizer, exchange=False)
    elif fault == "sent buffers":

        def sending(model: nn.Module, optimizer: torch.optim.Optimizer, exchange: bool) -> Any:
            prepared = prepare(model, optimizer, exchange=exchange)
            setattr(prepared[0], BUFFERS_IN_FORWARD, True)
            return prepared

        backend.prepare = sending
    elif fault == "sum":
        backend._finish_exchange = summed


class OneRank(Callback):
    """A callback that changes a weight of the last rank after the third step."""

    def on_step_end(self, run: RunView, result: Any) -> None:
        if run.progress.step == 3 and run.world.rank == run.world.size - 1:
            with torch.no_grad():
                next(run.model.parameters())[0, 0] += 1e-6


if __name__ == "__main__":
    run_job(Options, train)
