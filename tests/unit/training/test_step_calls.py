"""The number of Python calls that the Trainer adds to a step: unlike seconds, it does not depend on the load."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from hvd_trainer import Callback, Trainer, TrainerOptions
from hvd_trainer.config.options import EngineOptions, LogOptions, TrainOptions
from hvd_trainer.observe.callback import RunView

SAMPLES, BATCH = 8 * 60, 8
STEPS = SAMPLES // BATCH
MAX_CALLS = 85
"""Those of the Trainer beyond the loop by hand: 75 in a step, of which 5 are a share of the end of the epoch."""


class Calls(Callback):
    """Count the calls of Python functions in the second epoch."""

    def __init__(self) -> None:
        self.number = 0

    def on_epoch_end(self, run: RunView, record: dict[str, Any]) -> None:
        sys.setprofile(self._count if record["epoch"] == 1 else None)

    def _count(self, frame: Any, event: str, argument: Any) -> None:
        self.number += event == "call"

    def of(self, function: Callable[[], object]) -> int:
        """Return the calls of one function."""
        sys.setprofile(self._count)
        try:
            function()
        finally:
            sys.setprofile(None)
        return self.number


def test_trainer_adds_few_calls_to_a_step() -> None:
    torch.manual_seed(0)
    inputs, targets = torch.randn(SAMPLES, 8), torch.randn(SAMPLES, 8)
    model, calls = nn.Linear(8, 8), Calls()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def by_hand() -> None:
        for chosen in torch.randperm(SAMPLES).split(BATCH):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs[chosen]), targets[chosen]).backward()
            optimizer.step()

    by_hand()  # the first step imports
    alone = Calls().of(by_hand)
    options = TrainerOptions(
        engine=EngineOptions(backend="single"),
        train=TrainOptions(epochs=2, batch_size=BATCH),
        log=LogOptions(quiet=True),
    )
    with Trainer(options) as trainer:
        trainer.fit(model, optimizer, nn.functional.mse_loss, TensorDataset(inputs, targets), callbacks=[calls])
    assert calls.number - alone < MAX_CALLS * STEPS
