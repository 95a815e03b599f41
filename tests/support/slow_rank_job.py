"""A small job whose batches rank 1 takes 30 ms to fetch; each rank works in a folder of its own.

BLOCK="fail": rank 1 fails in step 5; a file name: it cannot be written.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hvd_trainer import Callback, RunView, TensorData, Trainer, TrainerOptions, run_job


class Block(Callback):
    def on_step_end(self, run: RunView, result: Any) -> None:
        block = os.environ.get("BLOCK", "")
        if block == "fail" and run.progress.step == 5 and run.world.rank:
            raise RuntimeError("the user's own mistake")
        if "." in block:
            Path("log/profile", block, "full").mkdir(parents=True, exist_ok=True)


def main(options: TrainerOptions) -> None:
    with Trainer(options) as trainer:
        folder = Path(str(trainer.world.rank))
        folder.mkdir(exist_ok=True)
        os.chdir(folder)

        def fetch(inputs: Tensor) -> Tensor:
            time.sleep(0.03 * trainer.world.rank)
            return inputs

        inputs = torch.randn(2560, 8)
        data = TensorData(inputs, (inputs[:, 0] > 0).long(), fetch)
        model = torch.nn.Linear(8, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer.fit(model, optimizer, torch.nn.functional.cross_entropy, data, callbacks=[Block()])


if __name__ == "__main__":
    run_job(TrainerOptions, main)
