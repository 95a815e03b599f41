"""A job for the Trainer with a planted cause of slowness: `planted_job.py --planted CAUSE`.

The line to blame has a comment `# planted: CAUSE`.
"""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from hvd_trainer import Callback, TensorData, Trainer, TrainerOptions, run_job

SAMPLES = 4096
TOUCHED = 2**28
"""Bytes of memory that are used in each step."""


@dataclass(frozen=True)
class PlantedOptions(TrainerOptions):
    planted: str = "nothing"
    """the cause"""


def busy(seconds: float) -> None:
    """Compute in Python."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


class Planted(Dataset[tuple[Tensor, int]]):
    """Samples that take long to fetch."""

    def __init__(self, fetch: Callable[[int], Any]) -> None:
        self._fetch = fetch

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self._fetch(index)
        return torch.randn(64), index % 2


def read(index: int) -> None:
    time.sleep(0.002)  # planted: disk


def decode(index: int) -> None:
    pixels = bytes(20_000)
    sum(pixel * 31 % 251 for pixel in pixels)  # planted: decode


class Wait(nn.Module):
    """A layer that waits for something."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, inputs: Tensor) -> Tensor:
        time.sleep(self.seconds)  # planted: forward
        return inputs


class Backward(torch.autograd.Function):
    """An operation whose gradient takes long."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        busy(0.03)  # planted: backward
        return gradient


STOP = """
import os, signal, sys, time
while True:
    os.kill(int(sys.argv[1]), signal.SIGSTOP)
    time.sleep(0.03)
    os.kill(int(sys.argv[1]), signal.SIGCONT)
    time.sleep(0.01)
"""
"""Stops a process for three quarters of the time, as a limit on its CPU time would."""


class Gradient(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = Backward.apply(inputs)
        return result


class SlowUpdate(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        busy(0.03)  # planted: update
        return super().step(closure)


def slow_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    total = outputs.new_zeros(())
    for output, target in zip(outputs, targets, strict=True):
        weights = 1 - output.detach().softmax(0)
        total = total + weights[target] ** 2 * nn.functional.cross_entropy(output, target)  # planted: loss
    return total / len(outputs)


def slow_metric(outputs: Tensor, targets: Tensor) -> Tensor:
    time.sleep(0.04)  # planted: metric
    return (outputs.argmax(1) == targets).float().mean()


class Sleep(Callback):
    def on_step_end(self, run: Any, result: Any) -> None:
        time.sleep(0.05)  # planted: callback


class Touch(Callback):
    """Needs more memory than there is."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, TOUCHED)

    def on_step_end(self, run: Any, result: Any) -> None:
        for place in range(0, TOUCHED, mmap.PAGESIZE):
            self._memory[place] = run.progress.step % 256  # planted: swap


class Failing(Sleep):
    def on_step_end(self, run: Any, result: Any) -> None:
        super().on_step_end(run, result)
        if run.progress.step == 20:
            raise ValueError("planted")


class Sums(Callback):
    """Adds up a number of each step on all ranks."""

    def on_step_end(self, run: Any, result: Any) -> None:
        for loss in result.losses * 10:
            run.backend.collectives.all_reduce(loss)  # planted: collective


class Evaluates(Callback):
    def on_step_end(self, run: Any, result: Any) -> None:
        if run.world.rank == 0 and run.progress.step % 4 == 0:
            for _ in range(100):
                run.model(torch.randn(200, 64))  # planted: rank 0 evaluates


class Checks(Callback):
    def on_step_end(self, run: Any, result: Any) -> None:
        if run.progress.step % 25 == 0:
            time.sleep(0.5)  # planted: callback hiccups


def hold_gil() -> None:
    while True:
        sum(range(1000))  # planted: gil


class MoreOnOne(Dataset[tuple[Tensor, int]]):
    """Longer samples on one rank."""

    def __init__(self, rank: int) -> None:
        self._length = 2048 if rank == 1 else 64

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.ones(self._length, 64), index % 2


class Mean(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.mean(1)


def data_of(planted: str, rank: int) -> Any:
    if planted == "one rank has more":
        return MoreOnOne(rank)
    fetches = {"disk": read, "decode": decode, "worker decode": decode}
    if planted in fetches:
        return Planted(fetches[planted])
    inputs = torch.randn(SAMPLES, 64)
    return TensorData(inputs, (inputs[:, 0] > 0).long())


def main(options: PlantedOptions) -> None:
    planted = options.planted
    if planted == "anomaly":
        torch.autograd.set_detect_anomaly(True)  # planted: anomaly
    with Trainer(options) as trainer:
        rank = trainer.world.rank
        data = data_of(planted, rank)
        width = 256
        layers: list[nn.Module] = [nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
        if planted == "overhead":
            layers = [nn.Linear(64, 64)] + [nn.LayerNorm(64) for _ in range(200)]
            width = 64
        if planted == "one bucket":
            width = 1024
            layers = [nn.Linear(64, width), *(nn.Linear(width, width) for _ in range(5))]
        if planted == "forward":
            layers.append(Wait(0.04))
        if planted == "backward":
            layers.append(Gradient())
        if planted == "one rank has more":
            layers.append(Mean())
        model = nn.Sequential(*layers, nn.Linear(width, 2))
        kind = SlowUpdate if planted == "update" else torch.optim.SGD
        optimizer = kind(model.parameters(), lr=0.01)
        if planted == "slow rank" and rank == 1:
            subprocess.Popen([sys.executable, "-c", STOP, str(os.getpid())])
        if planted == "gil" and rank == 1:
            for _ in range(2):
                threading.Thread(target=hold_gil, name="prefetch", daemon=True).start()
        callbacks = {
            "callback": [Sleep()],
            "callback, then failure": [Failing()],
            "callback hiccups": [Checks()],
            "collective": [Sums()],
            "rank 0 evaluates": [Evaluates()],
            "swap": [Touch()] if planted == "swap" else [],
        }
        trainer.fit(
            model,
            optimizer,
            slow_loss if planted == "loss" else nn.functional.cross_entropy,
            data,
            metrics={"accuracy": slow_metric} if planted == "metric" else {},
            callbacks=callbacks.get(planted, []),
        )


if __name__ == "__main__":
    run_job(PlantedOptions, main)
