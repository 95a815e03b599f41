"""Evaluations: they change no bit of a training, stop at once with the job, and give the same figures anywhere."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from combinations import case
from launchers import run_ranks
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from trainings import digest, options_of, signs

from hvd_trainer import PreemptedError, Trainer

pytestmark = pytest.mark.warm

ENGINES = [case("ddp"), case("horovod")]
NUM, BATCH = 30, 4
EVALUATED = 150
"""Batches of rank 0's validation data."""
SECONDS = 0.04
"""Time that each takes in a run that is disturbed."""


class Restless(nn.Module):
    """A model with batch norm and dropout, which also in an evaluation draws numbers and changes a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 2))
        self.net[1].eval()  # as for frozen layers
        self.register_buffer("calls", torch.zeros(()))

    def train(self, mode: bool = True) -> Restless:
        super().train(mode)
        self.net[1].train(mode and self.calls.item() > 3)
        return self

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        noise = torch.randn(2) * 0.01 * torch.sin(self.calls)
        return self.net(inputs) + noise


class Mean:
    """A metric object with a state, of no kind but its own."""

    def reset(self) -> None:
        self.total = self.count = 0.0

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.total += float(outputs.sum())
        self.count += len(targets)

    def merge_state(self, other: Any) -> None:
        self.total += other.total
        self.count += other.count

    def compute(self) -> float:
        return self.total / self.count

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class Unequal(IterableDataset[tuple[Tensor, Tensor]]):
    """Validation data of which rank 0 has most, and the last of several ranks a few batches.

    Args:
        signals: in which pass the last rank gets a SIGTERM, while the others are slow.
    """

    shards_by_rank = True

    def __init__(self, rank: int, size: int, signals: int | None) -> None:
        self.has_signal, self.signals = rank == size - 1, signals
        self.batches = 5 if self.has_signal and size > 1 else EVALUATED // (rank + 1)
        self.passes = self.taken = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.passes, self.taken = self.passes + 1, 0
        data = signs(BATCH * self.batches)
        for number, sample in enumerate(zip(data.inputs, data.targets, strict=True), 1):
            if self.passes == self.signals:
                time.sleep(SECONDS / BATCH)
                self.taken = number // BATCH
                if self.has_signal and number == 5 * BATCH:
                    os.kill(os.getpid(), signal.SIGTERM)
            yield sample


def train(backend: str, folder: str | None, signals: int | None = None, **options: Any) -> dict[str, Any]:
    """Train until the end, or until a signal in an evaluation; return what this rank then has."""
    chosen = {"epochs": 3, "batch_size": BATCH, "workers": 0, "log_dir": folder, "save_every_s": None, **options}
    history: Any = ()
    with suppress(PreemptedError), Trainer(options_of(backend, **chosen)) as trainer:
        rank, size = trainer.world.rank, trainer.world.size
        model, data = Restless(), Unequal(rank, size, signals)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        loss = nn.CrossEntropyLoss()
        metrics = {"mean": Mean()}
        history = trainer.fit(model, optimizer, loss, signs(NUM), data, metrics=metrics)
    names = [f"{split}_{name}" for split in ("train", "val") for name in ("loss", *metrics)]
    return {
        "rank": rank,
        "weights": digest(model.state_dict()),
        "records": [[record[name] for name in (*names, "step", "samples")] for record in history],
        "taken": data.taken,
    }


def disturbed_and_not(backend: str, folder: str, options: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Train undisturbed, and stopped in the second evaluation and resumed."""
    runs = {
        "whole": train(backend, f"{folder}/whole", **options),
        "stopped": train(backend, f"{folder}/parts", signals=2, **options),
        "resumed": train(backend, f"{folder}/parts", resume="auto", **options),
    }
    return runs["whole"]["rank"], runs


@pytest.mark.parametrize("backend", ENGINES)
@pytest.mark.parametrize("size", [1, 3])
def test_signal_stops_an_evaluation(backend: str, size: int, tmp_path: Path) -> None:
    """It was heard after the evaluation; ranks that have no batch left stop with the others.

    What the evaluation had drawn and averaged until then is not part of the save.
    """
    args = (backend, str(tmp_path), {})
    for rank in run_ranks(disturbed_and_not, num_processes=size, args=args):
        assert rank["stopped"]["records"] == []
        assert rank["stopped"]["taken"] < EVALUATED / 2
        assert rank["resumed"]["weights"] == rank["whole"]["weights"]
        assert rank["resumed"]["records"] == rank["whole"]["records"]
        assert math.isfinite(rank["whole"]["records"][-1][0])
