"""Small data, a training that is stopped, and a digest of its weights, for checks of trainings."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hvd_trainer import Callback, RunView, TensorData


def signs(num: int) -> TensorData:
    """Return six numbers per sample, and whether their sum is positive."""
    inputs = torch.randn(num, 6, generator=torch.Generator().manual_seed(1))
    return TensorData(inputs, (inputs.sum(1) > 0).long(), name="signs")


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
