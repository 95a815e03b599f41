"""A job that lasts as long as it is attacked: its steps are slow until <log-dir>/attacked exists."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hvd_trainer import Callback, RunView, TensorData, Trainer, TrainerOptions, run_job

STEPS_PER_EPOCH = 50


class Attacked(Callback):
    """Slows down each step, and waits at the end of the last epoch, until the attack is over."""

    def __init__(self, mark: Path, epochs: int) -> None:
        self._mark, self._epochs = mark, epochs

    def on_step_end(self, run: RunView, result: Any) -> None:
        if not self._mark.exists():
            time.sleep(0.02)

    def on_epoch_end(self, run: RunView, record: dict[str, Any]) -> None:
        while record["epoch"] == self._epochs and not self._mark.exists():
            time.sleep(0.1)


def main(options: TrainerOptions) -> None:
    with Trainer(options) as trainer:
        torch.manual_seed(0)
        size = STEPS_PER_EPOCH * options.train.batch_size * trainer.world.size
        data = TensorData(torch.randn(size, 8), torch.randint(0, 2, (size,)))
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        assert options.log.log_dir is not None
        callback = Attacked(Path(options.log.log_dir) / "attacked", options.train.epochs)
        trainer.fit(model, optimizer, nn.functional.cross_entropy, data, callbacks=[callback])


if __name__ == "__main__":
    run_job(TrainerOptions, main)
