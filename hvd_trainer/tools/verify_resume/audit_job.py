"""The training that `verify-resume` kills: small, with dropout and batch norm, and with a record of every sample.

<log-dir>/audit/rank-R      one line per step of rank R: step, epoch, and the numbers of the samples
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hvd_trainer.config.options import TrainerOptions
from hvd_trainer.data import TensorData
from hvd_trainer.observe.callback import Callback, RunView
from hvd_trainer.training.job import run_job
from hvd_trainer.training.trainer import Trainer

FEATURES, CLASSES, WIDTH = 64, 10, 512
STEPS_PER_EPOCH = 6


@dataclass(frozen=True)
class VerifyOptions(TrainerOptions):
    """Train on numbered random samples and write down which, and when."""


class RecordingNetwork(nn.Module):
    """A network whose first input is the sample's number, which is recorded and not computed with."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            *(nn.Linear(FEATURES, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Dropout(0.3)),
            *(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES)),
        )
        self.numbers: list[int] = []

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.numbers += inputs[:, 0].long().tolist()
        result: Tensor = self.net(inputs[:, 1:])
        return result


class SampleRecorder(Callback):
    """Appends each step's samples to a file when the step is done."""

    def __init__(self, model: RecordingNetwork, folder: Path, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.model = model
        self.file = os.open(folder / f"rank-{rank}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(self.file, b"\n")  # ends a line that a kill has cut off

    def on_step_end(self, run: RunView, result: Any) -> None:
        progress = run.progress
        numbers, self.model.numbers = self.model.numbers, []
        os.write(self.file, " ".join(map(str, [progress.step, progress.epoch, *numbers])).encode() + b"\n")


def numbered_samples(count: int, seed: int) -> TensorData:
    """Return random samples of ten classes, each with its number in front."""
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(0, CLASSES, (count,), generator=generator)
    inputs = torch.randn(count, FEATURES, generator=generator) + targets.view(-1, 1) / 4
    return TensorData(torch.cat([torch.arange(count).view(-1, 1), inputs], 1), targets, name="numbered")


def train(options: VerifyOptions) -> None:
    """Train on this rank."""
    with Trainer(options) as trainer:
        count = STEPS_PER_EPOCH * options.train.batch_size * trainer.world.size
        model = RecordingNetwork()
        assert options.log.log_dir is not None
        audit = SampleRecorder(model, Path(options.log.log_dir) / "audit", trainer.world.rank)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        loss = nn.functional.cross_entropy
        trainer.fit(
            model, optimizer, loss, numbered_samples(count, 1), numbered_samples(256, 2), callbacks=[audit]
        )


if __name__ == "__main__":
    run_job(VerifyOptions, train)
