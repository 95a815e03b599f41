"""Options and small data of a training, a training that is stopped, and a digest of its weights."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hvd_trainer import Callback, History, RunView, TensorData, Trainer, TrainerOptions, World
from hvd_trainer.utils.tensors import state_on_this_stage


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


@dataclass(frozen=True)
class Trained:
    """What a rank has after a training."""

    model: Any
    optimizer: Any
    world: World
    history: History = field(default_factory=History)
    """empty where the training was stopped"""

    @property
    def weights(self) -> str:
        return digest(self.model.state_dict())

    def records(self, *names: str) -> list[list[Any]]:
        """Return figures of each epoch."""
        return [[record[name] for name in names] for record in self.history]


OF_FIT = frozenset(inspect.signature(Trainer.fit).parameters)
SGD = partial(torch.optim.SGD, lr=0.1)


def train(
    backend: str,
    make: Callable[[], nn.Module],
    train_data: Any,
    val_data: Any = None,
    *,
    optimizer: Callable[[Any], Any] = SGD,
    stop_after: int | None = None,
    ddp_kwargs: Mapping[str, Any] | None = None,
    **how: Any,
) -> Trained:
    """Train until a step or the end.

    Args:
        make: makes the model, with the numbers that the trainer has seeded.
        optimizer: makes one of the model's parameters.
        stop_after: the step, if any.
        ddp_kwargs: of the trainer.
        how: further arguments of `Trainer.fit`, and options, by their names.
    """
    given = {"loss": nn.functional.cross_entropy, **{name: how.pop(name) for name in OF_FIT & how.keys()}}
    given["callbacks"] = [*given.get("callbacks", ()), StopAfter(stop_after)]
    with Trainer(options_of(backend, **how), ddp_kwargs=ddp_kwargs) as trainer:
        model = make()
        trained = Trained(model, optimizer(model.parameters()), trainer.world)
        with suppress(StoppedError):
            history = trainer.fit(model, trained.optimizer, train_data=train_data, val_data=val_data, **given)
            trained = replace(trained, history=history)
    return trained


def signs(num: int) -> TensorData:
    """Return six numbers per sample, and whether their sum is positive."""
    inputs = torch.randn(num, 6, generator=torch.Generator().manual_seed(1))
    return TensorData(inputs, (inputs.sum(1) > 0).long(), name="signs")


def fit_small(engine: str, callbacks: Sequence[Callback] = (), **options: Any) -> list[Any]:
    """Train a small network; return the digest of its weights, and the rank's place on its node and the nodes'."""
    usual = {"epochs": 4, "batch_size": 4, "seed": 3, "device": "cpu", "callbacks": callbacks}
    trained = train(engine, with_norm, signs(48), signs(12), **usual | options)
    world = trained.world
    return [trained.weights, [world.local_rank, world.local_size, world.node_rank, world.num_nodes]]


def with_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 2))


class StoppedError(Exception):
    """Stands for any cause that ends a run."""


class StopAfter(Callback):
    """A callback that ends a run after a step; None: never."""

    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_step_end(self, run: RunView, result: Any) -> None:
        if run.progress.step == self.step:
            raise StoppedError


class WholeWeights(Callback):
    """A callback that keeps, on rank 0, the weights of all stages after the last epoch."""

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}

    def on_epoch_end(self, run: Any, record: dict[str, Any]) -> None:
        whole = run.placement.gather(state_on_this_stage(run.model)) or {}
        self.weights = {name: tensor.clone() for name, tensor in whole.items()}


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Return a digest of a state's tensors in their order."""
    rows = (tensor.contiguous().flatten().view(torch.uint8) for tensor in tensors.values())
    return hashlib.sha256(b"".join(row.numpy().tobytes() for row in rows)).hexdigest()
