"""Trainings of many kinds that `test_trainer.py` runs in every rank in one launch and compares."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, StepLR
from trainings import digest, signs

from hvd_trainer import (
    Callback,
    EngineOptions,
    LogOptions,
    RunView,
    Trainer,
    TrainerOptions,
    TrainOptions,
    accuracy,
)
from hvd_trainer.errors import UserError

NUM = 40


def small_model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2))


class Rates(Callback):
    """A callback that records the effective learning rate of each step, and the calls."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.epochs: list[int] = []

    def on_step_end(self, run: RunView, result: Any) -> None:
        self.rates.append(run.rate.last)

    def on_epoch_end(self, run: RunView, record: dict[str, Any]) -> None:
        self.epochs.append(record["epoch"])


def train(
    backend: str,
    folder: str | None = None,
    *,
    lr: float = 0.5,
    scheduler: Any = None,
    on_object: bool = False,
    data: Any = None,
    with_norm: bool = False,
    loss: Any = nn.functional.cross_entropy,
    **options: Any,
) -> dict[str, Any]:
    """Train once; return the records, the learning rates and the fingerprint of the weights."""
    rates = Rates()
    settings = TrainerOptions(
        engine=EngineOptions(backend=backend),  # type: ignore[arg-type]
        train=TrainOptions(**{"epochs": 2, "global_batch_size": 8, **options}),
        log=LogOptions(log_dir=folder, log_every=3, quiet=True),
    )
    with Trainer(settings) as trainer:
        model = small_model()
        if with_norm:
            model = nn.Sequential(nn.BatchNorm1d(6), model)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        if on_object:
            scheduler = scheduler(optimizer)
        history = trainer.fit(
            model,
            optimizer,
            loss,
            data or signs(NUM),
            signs(7),
            scheduler=scheduler,
            metrics={"accuracy": accuracy},
            callbacks=[rates],
        )
        rank = trainer.world.rank
    return {
        "rank": rank,
        "records": history.epochs,
        "rates": rates.rates,
        "epochs": rates.epochs,
        "weights": digest(model.state_dict()),
        "finite": all(bool(tensor.isfinite().all()) for tensor in model.state_dict().values()),
        "own lr": optimizer.param_groups[0]["lr"],
    }


def halve(optimizer: Any) -> StepLR:
    return StepLR(optimizer, step_size=1, gamma=0.5)


def closed_form(optimizer: Any) -> LambdaLR:
    return LambdaLR(optimizer, lambda epoch: 0.5**epoch)


class BadLoss:
    """Cross-entropy that is not finite in some of the forward passes of one rank."""

    def __init__(self, rank: int, passes: set[int], bad: float = math.nan) -> None:
        self.passes, self.bad = (passes if rank == int(os.environ["RANK"]) else set()), bad
        self.count = 0

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.count += 1
        return nn.functional.cross_entropy(outputs, targets) + (self.bad if self.count in self.passes else 0)


def refused(*args: Any, **options: Any) -> str:
    """Train until our own error; return its text."""
    try:
        train(*args, **options)
    except UserError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def many(backend: str, folder: str) -> tuple[int, dict[str, Any]]:
    """Train several set-ups in one process, each of which starts the engine anew."""
    log = str(Path(folder) / backend)
    found = {
        "plain": train(backend, log),
        "again": train(backend),
        "halved": train(backend, scheduler=halve),
        "halved object": train(backend, scheduler=halve, on_object=True, lr_scaling="linear", warmup_epochs=0.6),
        "closed form": train(backend, scheduler=closed_form, warmup_epochs=1.6),
        "decayed": train(backend, warmup_epochs=0.4, lr_decay="linear"),
        "half a cosine": train(backend, lr_decay="cosine"),
        "accumulated": train(backend, accumulate=2, global_batch_size=24, max_norm=0.5),
        "bf16": train(backend, precision="bf16"),
        "fp16": train(backend, precision="fp16"),
        "not finite": refused(backend, f"{log}-nan", loss=BadLoss(1, {2})),
        "not finite in fp16": refused(backend, loss=BadLoss(1, {5}, math.inf), precision="fp16"),
        "skipped": train(backend, loss=BadLoss(1, {2, 4}), non_finite="skip", with_norm=True),
        "skipped, reproducible": train(
            backend, loss=BadLoss(1, {3}, math.inf), non_finite="skip", reproducible=4, with_norm=True
        ),
        "all skipped": refused(backend, loss=BadLoss(0, set(range(100))), non_finite="skip"),
    }
    if backend == "horovod":  # whose hooks are ours; compiling takes each rank 11 s
        found["compiled"] = train(backend, compile=True, epochs=1)
    return found["plain"]["rank"], found
