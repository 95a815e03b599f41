"""A training of numbered samples for horovodrun's elastic mode; each process records what it trained on.

<log-dir>/audit/PROCESS     one line per step: step, epoch, ranks, when, and the numbers of this rank's samples
"""

from __future__ import annotations

import os
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hvd_trainer import Callback, RunView, TensorData, Trainer, TrainerOptions, run_job

FEATURES, CLASSES, WIDTH = 64, 10, 512
SAMPLES, GLOBAL_BATCH = 144, 24
LONG_CALLBACK = "LONG_CALLBACK"
"""The variable that tells how long the first rank's callback takes after the second epoch, in seconds."""


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


def numbered_samples(count: int, seed: int) -> TensorData:
    """Return random samples of ten classes, each with its number in front."""
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(0, CLASSES, (count,), generator=generator)
    inputs = torch.randn(count, FEATURES, generator=generator) + targets.view(-1, 1) / 4
    return TensorData(torch.cat([torch.arange(count).view(-1, 1), inputs], 1), targets, name="numbered")


class Audit(Callback):
    def __init__(self, model: RecordingNetwork, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.model, self.file = model, (folder / str(os.getpid())).open("w", buffering=1)

    def on_step_end(self, run: RunView, result: Any) -> None:
        progress, size = run.progress, run.world.size
        # A step that was broken off has left its samples in front.
        numbers = self.model.numbers[-GLOBAL_BATCH // size :]
        line = [progress.step, progress.epoch, size, time.monotonic_ns(), *numbers]
        self.file.write(" ".join(map(str, line)) + "\n")
        self.model.numbers = []
        time.sleep(0.01)

    def on_epoch_end(self, run: RunView, record: dict[str, Any]) -> None:
        # Of those that begin together: one that comes later has no such epoch.
        if record["epoch"] == 2 and run.world.is_first and run.world.size > 1 and LONG_CALLBACK in os.environ:
            print("a long callback", flush=True)
            time.sleep(float(os.environ[LONG_CALLBACK]))


def trained_on(folder: Path) -> dict[int, Counter[int]]:
    """Return how often each sample was trained on, by epoch, in the history that led to the end.

    A step that was lost with a rank is made again, and its last time counts.
    """
    lines = defaultdict(list)
    for file in (folder / "audit").iterdir():
        for line in file.read_text().splitlines():
            step, epoch, size, when, *numbers = map(int, line.split())
            lines[step].append((when, size, epoch, numbers))
    seen: dict[int, Counter[int]] = defaultdict(Counter)
    for step in lines.values():
        step.sort()
        size = step[-1][1]
        for _, _, epoch, numbers in step[-size:]:
            seen[epoch].update(numbers)
    return seen


def main(options: TrainerOptions) -> None:
    with Trainer(options) as trainer:
        model = RecordingNetwork()
        assert options.log.log_dir is not None
        audit = Audit(model, Path(options.log.log_dir) / "audit")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        trainer.fit(model, optimizer, nn.functional.cross_entropy, numbered_samples(SAMPLES, 1), callbacks=[audit])


if __name__ == "__main__":
    run_job(TrainerOptions, main)
