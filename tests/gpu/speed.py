"""The time of a step by hand and by the Trainer, by functions that a rank runs."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch
from stream_checks import place
from torch import nn
from torch.nn.functional import cross_entropy

from hvd_trainer import Callback, RunView, TensorData, Trainer, TrainerOptions
from hvd_trainer.config.parser import parse
from hvd_trainer.jobs.models import MODELS
from hvd_trainer.utils import accelerator

ON_CUDA = accelerator.kind() == "cuda"
WARM, BLOCKS = 30, 3


class Clock(Callback):
    """Takes the time of blocks of steps, each to the end of its work on the device."""

    def __init__(self, device: torch.device, block: int) -> None:
        self.device, self.block, self.number = device, block if ON_CUDA else 1, 0
        self.total = WARM + BLOCKS * self.block
        self._times: list[float] = []

    def on_step_end(self, run: RunView | None, result: Any) -> None:
        self.number += 1
        if self.number >= WARM and (self.number - WARM) % self.block == 0:
            accelerator.synchronize(self.device)
            self._times.append(time.perf_counter())

    def step_us(self) -> float:
        """Return the median of the blocks, for a step."""
        blocks = [after - before for before, after in zip(self._times, self._times[1:], strict=False)]
        return 1e6 * median(blocks) / self.block


def parts(name: str) -> tuple[nn.Module, TensorData, int, Clock]:
    """Return a model, as many images as are timed, the batch size, and the clock."""
    torch.manual_seed(0)
    if name == "resnet":
        from torchvision.models import resnet50

        model, clock, batch, shape = resnet50(num_classes=10), Clock(place(), 10), 256, (3, 224, 224)
    else:
        model, clock, batch, shape = MODELS[name](), Clock(place(), 200), 250, (1, 28, 28)
    images = torch.randn(clock.total * batch, *shape, dtype=torch.bfloat16, device=clock.device)
    data = TensorData(images, torch.randint(10, (len(images),), device=clock.device), torch.Tensor.float)
    return model.to(clock.device), data, batch, clock


def step_by_hand(name: str, words: list[str]) -> tuple[int, float]:
    """Time the loop that a person writes, with the options that a Trainer has."""
    model, data, batch, clock = parts(name)
    layout = torch.channels_last if "--channels-last" in words else torch.contiguous_format
    model.to(memory_format=layout)
    half = torch.autocast(clock.device.type, torch.bfloat16, enabled="bf16" in words)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=ON_CUDA)
    if "--compile" in words:
        model.compile()
    total = torch.zeros((), dtype=torch.float64, device=clock.device)
    for chosen in torch.randperm(len(data)).to(clock.device).split(batch):
        inputs, targets = data.inputs.index_select(0, chosen).float(), data.targets.index_select(0, chosen)
        with half:
            loss = cross_entropy(model(inputs.contiguous(memory_format=layout)), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total += loss.detach() * len(chosen)
        clock.on_step_end(None, None)
    return 0, clock.step_us()


def step_by_trainer(name: str, words: list[str]) -> tuple[int, float]:
    """Time the same by the Trainer."""
    model, data, batch, clock = parts(name)
    usual = ["--quiet", "--epochs", "9", "--log-every", "100000", "--batch-size", str(batch)]
    with Trainer(parse(TrainerOptions, [*usual, "--max-steps", str(clock.total), *words])) as trainer:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=ON_CUDA)
        trainer.fit(model, optimizer, cross_entropy, data, callbacks=[clock])
    return 0, clock.step_us()
