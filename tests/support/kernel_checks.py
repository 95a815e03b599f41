"""Trainings with options on how a device computes; run by `test_kernels.py`, on ranks and without a GPU.

A graph's stand-in does at each launch what a graph would do: the same again, with what lies in the same tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from trainings import digest

from hvd_trainer import EngineOptions, LogOptions, TensorData, Trainer, TrainerOptions, TrainOptions, accuracy
from hvd_trainer.config.options import ParallelOptions
from hvd_trainer.utils import accelerator


class Kept:
    """A metric object that keeps the outputs themselves until the end."""

    def __init__(self) -> None:
        self.outputs: list[Tensor] = []

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.outputs.append(outputs.detach())

    def compute(self) -> float:
        return float(torch.cat(self.outputs).double().sum()) if self.outputs else 0.0

    def reset(self) -> None:
        self.outputs = []

    def merge_state(self, other: Kept) -> None:
        self.outputs += other.outputs


class Where(nn.Module):
    """A model that records at which addresses its inputs were."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[int] = []

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.places.append(inputs.data_ptr())
        return inputs


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        Where(), nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(), nn.Flatten(), nn.Linear(64, 3)
    )


def optimizer_of(kind: str, its: nn.Module) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(its.parameters(), lr=0.25, momentum=0.5, fused=True)
    return torch.optim.AdamW(its.parameters(), lr=0.03125, weight_decay=0.5, fused=True)


def train(backend: str, *, optimizer: str = "adamw", parallel: Any = None, **options: Any) -> dict[str, Any]:
    """Train two epochs of 17 steps, the last one smaller; the rates are exact in fp32, too."""
    launches: list[Callable[[], None]] = []

    def capture(run: Callable[[], None], stream: Any) -> Callable[[], None]:
        assert stream == "that of prepare"
        launches.append(run)
        return run

    with (
        mock.patch.object(accelerator, "can_capture", return_value=True),
        mock.patch.object(accelerator, "capture", capture),
        mock.patch.object(accelerator, "side_stream", return_value=nullcontext("that of prepare")),
        Trainer(
            TrainerOptions(
                engine=EngineOptions(backend=backend),  # type: ignore[arg-type]
                train=TrainOptions(**{"epochs": 2, "global_batch_size": 8, "max_norm": 1.0, **options}),
                log=LogOptions(quiet=True),
                parallel=parallel or ParallelOptions(),
            )
        ) as trainer,
    ):
        its = model()
        generator = torch.Generator().manual_seed(2)
        inputs = torch.randn(132, 2, 6, 6, generator=generator)
        data = TensorData(inputs, torch.randint(3, (132,), generator=generator))
        history = trainer.fit(
            its,
            optimizer_of(optimizer, its),
            nn.functional.cross_entropy,
            data,
            data,
            scheduler=lambda its: torch.optim.lr_scheduler.StepLR(its, 1, 0.5),
            metrics={"accuracy": accuracy, "sum": Kept()},
        )
        rank = trainer.world.rank
    where = its[0]
    assert isinstance(where, Where)
    return {
        "weights": digest({name: tensor.contiguous() for name, tensor in its.state_dict().items()}),
        "figures": [
            {k: v for k, v in record.items() if k.endswith(("loss", "accuracy", "sum")) and math.isfinite(v)}
            for record in history.epochs
        ],
        "captured": len(launches),
        "places": len(set(where.places[-16:-1])),  # all of the second epoch's, but the last one
        "strides": its[1].weight.stride(),
        "rank": rank,
    }


def both(backend: str) -> tuple[int, list[dict[str, Any]]]:
    """Train captured and not, each with contiguous and with channels-last weights."""
    found = [
        train(backend),
        train(backend, capture_step=True),
        train(backend, channels_last=True),
        train(backend, channels_last=True, capture_step=True),
    ]
    return found[0]["rank"], found
