"""A small training that records where each of its ranks was, in <log-dir>/world-RANK.json."""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

from hvd_trainer import TensorData, Trainer, TrainerOptions, run_job
from hvd_trainer.data.per_node import once_per_node

FETCHED = Path("/tmp/fetched")
"""Each host has its own."""


@dataclass(frozen=True)
class Options(TrainerOptions):
    """The trainer's, and:"""

    seconds_per_step: float = 0.0
    """to be disturbed in"""


class Slow(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return inputs


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
        Path(options.log.log_dir).mkdir(parents=True, exist_ok=True)
        (Path(options.log.log_dir) / f"world-{world.rank}.json").write_text(json.dumps(said))
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn(512, 16, generator=generator)
        model = nn.Sequential(Slow(options.seconds_per_step), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        trainer.fit(model, optimizer, nn.functional.cross_entropy, TensorData(inputs, (inputs[:, 0] > 0).long()))


if __name__ == "__main__":
    run_job(Options, main)
