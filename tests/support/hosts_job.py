"""A small training that records where each of its ranks was, in <log-dir>/world-RANK.json."""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hvd_trainer import Callback, RunView, TensorData, Trainer, TrainerOptions, run_job
from hvd_trainer.data.per_node import once_per_node

FETCHED = Path("/tmp/fetched")
"""Each host has its own."""


@dataclass(frozen=True)
class Options(TrainerOptions):
    """The trainer's, and:"""

    seconds_per_step: float = 0.0
    """to be disturbed in, until there is a file <log-dir>/over"""
    wait: bool = False
    """at the end of the last epoch for that file"""


class Slow(nn.Module):
    def __init__(self, seconds: float, over: Path) -> None:
        super().__init__()
        self.seconds, self.over = seconds, over

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.seconds and not self.over.exists():
            time.sleep(self.seconds)
        return inputs


class Wait(Callback):
    def __init__(self, epoch: int, over: Path) -> None:
        self.epoch, self.over = epoch, over

    def on_epoch_end(self, run: RunView, record: dict[str, Any]) -> None:
        while record["epoch"] == self.epoch and not self.over.exists():
            time.sleep(0.1)


def fetch() -> None:
    with FETCHED.open("a") as file:
        file.write("once\n")


def main(options: Options) -> None:
    with Trainer(options) as trainer:
        world = trainer.world
        once_per_node(trainer.backend, fetch, timeout_s=60)
        said = {
            **asdict(world),
            "hostname": socket.gethostname(),
            "pid": os.getpid(),
            "fetched": FETCHED.read_text(),
        }
        assert options.log.log_dir is not None
        folder = Path(options.log.log_dir)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"world-{world.rank}.json").write_text(json.dumps(said))
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn(512, 16, generator=generator)
        slow = Slow(options.seconds_per_step, folder / "over")
        model = nn.Sequential(slow, nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        data = TensorData(inputs, (inputs[:, 0] > 0).long())
        waits = [Wait(options.train.epochs, folder / "over")] if options.wait else []
        trainer.fit(model, optimizer, nn.functional.cross_entropy, data, callbacks=waits)


if __name__ == "__main__":
    run_job(Options, main)
