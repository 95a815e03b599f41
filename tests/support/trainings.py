"""Options and small data of a training, a training that is stopped, and a digest of its weights."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hvd_trainer import Callback, History, RunView, TensorData, Trainer, TrainerOptions


def options_of(backend: str = "single", **chosen: Any) -> TrainerOptions:
    """Return options of a quiet training, each chosen by its name, whatever its group."""
    chosen = {"backend": backend, "quiet": True, **chosen}
    groups = {}
    for name, group in vars(TrainerOptions()).items():
        mine = vars(group).keys() & chosen.keys()
        groups[name] = replace(group, **{option: chosen.pop(option) for option in mine})
    assert not chosen, f"there are no options {chosen}"
    return TrainerOptions(**groups)


def fit(options: TrainerOptions, model: nn.Module, train_data: Any, val_data: Any = None, **how: Any) -> History:
    """Train a model, by SGD and with cross-entropy unless `how` has others; return the history."""
    how.setdefault("loss", nn.functional.cross_entropy)
    how.setdefault("optimizer", torch.optim.SGD(model.parameters(), lr=0.1))
    with Trainer(options) as trainer:
        return trainer.fit(model, train_data=train_data, val_data=val_data, **how)


def signs(num: int) -> TensorData:
    """Return six numbers per sample, and whether their sum is positive."""
    inputs = torch.randn(num, 6, generator=torch.Generator().manual_seed(1))
    return TensorData(inputs, (inputs.sum(1) > 0).long(), name="signs")


def fit_small(engine: str, callbacks: Sequence[Callback] = (), **options: Any) -> list[Any]:
    """Train a small network; return the digest of its weights, and the rank's place on its node and the nodes'."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    chosen = options_of(engine, **{"epochs": 4, "batch_size": 4, "device": "cpu", **options})
    with Trainer(chosen) as trainer:
        trainer.fit(model, optimizer, nn.functional.cross_entropy, signs(48), signs(12), callbacks=callbacks)
        world = trainer.world
    return [digest(model.state_dict()), [world.local_rank, world.local_size, world.node_rank, world.num_nodes]]


def fit_small_rank(engine: str = "ddp") -> tuple[int, list[Any]]:
    """Return the rank, by its number on the node, and what `fit_small` gives there."""
    trained = fit_small(engine)
    return trained[1][0], trained


class StoppedError(Exception):
    """Stands for any cause that ends a run."""


class StopAfter(Callback):
    """A callback that ends a run after a step; None: never."""

    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_step_end(self, run: RunView, result: Any) -> None:
        if run.progress.step == self.step:
            raise StoppedError


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Return a digest of a state's tensors in their order."""
    return hashlib.sha256(b"".join(its.numpy().tobytes() for its in tensors.values())).hexdigest()
