"""`python speed_job.py WHAT ...`: one measurement in a process of its own; prints its figures as a line of JSON.

steps --loop raw|trainer --model quick|mlp|resnet [options of the trainer]    us, host us and launches per step
copy --bytes N            from the device to pinned memory of the host: us
norm --backend ddp        batch norm over two ranks, ours and PyTorch's: us, forward and backward
scaling LOG_DIR [options of the trainer]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from hvd_trainer import Callback, RunView, TensorData, Trainer, TrainerOptions
from hvd_trainer.config.parser import parse
from hvd_trainer.data.dataset import Normalise
from hvd_trainer.jobs.models import MODELS
from hvd_trainer.utils import accelerator

WARM, BLOCKS = 30, 3
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "hipLaunchKernel", "hipExtLaunch")


class Steps:
    """Times blocks of steps, and counts what a step launches (on a CPU: PyTorch's operators)."""

    def __init__(self, device: torch.device, block: int) -> None:
        self.device, self.block, self.number = device, block, 0
        self._began = 0.0
        self.timed = WARM + BLOCKS * block
        self.total = self.timed + 5
        self._wall: list[float] = []
        self._host: list[float] = []
        activities = [torch.profiler.ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=activities)

    def done(self) -> None:
        """Count a step."""
        self.number += 1
        if WARM < self.number <= self.timed and (self.number - WARM) % self.block == 0:
            self._host.append(time.perf_counter() - self._began)
            accelerator.synchronize(self.device)
            self._wall.append(time.perf_counter() - self._began)
        if self.number == self.timed:
            self._profiler.start()
        elif self.number == self.total:
            accelerator.synchronize(self.device)
            self._profiler.stop()
        elif self.number >= WARM and (self.number - WARM) % self.block == 0:
            accelerator.synchronize(self.device)
            self._began = time.perf_counter()

    def figures(self) -> dict[str, float]:
        names = [event.name for event in self._profiler.events()]
        counted = LAUNCHES if self.device.type == "cuda" else ("aten::",)
        launches = sum(name.startswith(counted) for name in names) / (self.total - self.timed)
        us = 1e6 / self.block
        return {"us": median(self._wall) * us, "host us": median(self._host) * us, "launches": launches}


class CountSteps(Callback):
    def __init__(self, steps: Steps) -> None:
        self.steps = steps

    def on_step_end(self, run: RunView, result: Any) -> None:
        self.steps.done()


def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "resnet":
        from torchvision.models import resnet50

        network: nn.Module = resnet50(num_classes=10)
        return network
    return MODELS[name]()


def images_for(name: str, steps: int, device: torch.device) -> tuple[Tensor, Tensor, int]:
    """Return images on the device, enough for the steps without a second epoch, labels, and the batch size."""
    if name == "resnet":
        batch, side = (4, 32) if device.type == "cpu" else (256, 224)
        images = torch.randn(steps * batch, 3, side, side, dtype=torch.bfloat16, device=device)
    else:
        batch = 250
        images = torch.randint(256, (steps * batch, 1, 28, 28), dtype=torch.uint8, device=device)
    return images, torch.randint(10, (len(images),), device=device), batch


def optimizer_of(model: nn.Module, device: torch.device) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=device.type == "cuda")


def right(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.argmax(1) == targets


def by_hand(args: argparse.Namespace, words: list[str], device: torch.device) -> dict[str, float]:
    """The loop that a person writes, with the options that the Trainer has."""
    model, steps = model_of(args.model), Steps(device, args.block)
    images, labels, batch = images_for(args.model, steps.total, device)
    layout = torch.channels_last if "--channels-last" in words else torch.contiguous_format
    model.to(device, memory_format=layout)
    half = torch.autocast(device.type, torch.bfloat16, enabled="bf16" in words)
    optimizer = optimizer_of(model, device)
    if "--compile" in words:
        model.compile()
    transform = Normalise(0.13, 0.31) if images.dtype == torch.uint8 else None
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    for chosen in torch.randperm(len(images)).to(device).split(batch):
        inputs, targets = images.index_select(0, chosen), labels.index_select(0, chosen)
        inputs = inputs if transform is None else transform(inputs)
        with half:
            outputs = model(inputs.contiguous(memory_format=layout))
            loss = cross_entropy(outputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        totals[0] += loss.detach() * len(chosen)
        totals[1] += right(outputs, targets).sum()
        steps.done()
    return steps.figures()


def by_trainer(args: argparse.Namespace, words: list[str], device: torch.device) -> dict[str, float]:
    model, steps = model_of(args.model), Steps(device, args.block)
    images, labels, batch = images_for(args.model, steps.total, device)
    usual = ["--quiet", "--epochs", "9", "--log-every", "100000", "--batch-size", str(batch)]
    options = parse(TrainerOptions, [*usual, "--max-steps", str(steps.total), "--device", device.type, *words])
    transform = Normalise(0.13, 0.31) if images.dtype == torch.uint8 else None
    with Trainer(options) as trainer:
        data = TensorData(images, labels, transform)
        model.to(device)  # where a fused optimizer finds its parameters
        optimizer = optimizer_of(model, device)
        callbacks = [CountSteps(steps)]
        trainer.fit(model, optimizer, cross_entropy, data, metrics={"accuracy": right}, callbacks=callbacks)
    return steps.figures()


def time_us(device: torch.device, action: Callable[[], Any], times: int) -> float:
    """Return the median of three blocks, in us for one."""
    taken = []
    for _ in range(1 + BLOCKS):
        accelerator.synchronize(device)
        began = time.perf_counter()
        for _ in range(times):
            action()
        accelerator.synchronize(device)
        taken.append(time.perf_counter() - began)
    return 1e6 * median(taken[1:]) / times


def copy(device: torch.device, size: int) -> dict[str, float]:
    """Return what it takes to copy that many bytes to pinned memory of the host."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty(size, dtype=torch.uint8, pin_memory=device.type != "cpu")
    return {"us": time_us(device, lambda: target.copy_(source, non_blocking=True), 1)}


def norm(words: list[str]) -> dict[str, float]:
    from hvd_trainer.backends import EngineOptions, create
    from hvd_trainer.backends.sync_batch_norm import convert_sync_batch_norm

    with create(parse(EngineOptions, words)) as backend:
        device = backend.device
        shape = (4, 8, 14, 14) if device.type == "cpu" else (256, 64, 56, 56)
        kinds: dict[str, nn.Module] = {"ours, us": nn.Sequential(nn.BatchNorm2d(shape[1]))}
        convert_sync_batch_norm(kinds["ours, us"], backend.collectives)
        if device.type != "cpu":
            kinds["PyTorch's, us"] = nn.SyncBatchNorm(shape[1])
        figures = {}
        for name, layer in kinds.items():
            layer.to(device)
            inputs = torch.randn(shape, device=device, requires_grad=True)

            def both_ways(layer: nn.Module = layer, inputs: Tensor = inputs) -> None:
                with torch.autocast(device.type, torch.bfloat16):
                    layer(inputs.bfloat16()).sum().backward()

            figures[name] = time_us(device, both_ways, 5)
        return figures if backend.world.is_first else {}


def scaling(log_dir: str, words: list[str]) -> None:
    """Three epochs of 20 steps, on whatever ranks there are; the speed stands in the log."""
    small = words[words.index("--device") + 1] == "cpu"
    batch, side = (16, 8) if small else (128, 112)
    samples = 20 * batch * int(os.environ.get("WORLD_SIZE", "1"))
    usual = ["--quiet", "--epochs", "3", "--batch-size", str(batch), "--log-dir", log_dir, "--precision", "bf16"]
    with Trainer(parse(TrainerOptions, [*usual, "--save-every-epochs", "None", *words])) as trainer:
        if small:
            model: nn.Module = nn.Sequential(nn.Flatten(), nn.Linear(3 * side * side, 64), nn.Linear(64, 10))
        else:
            model = model_of("resnet")
        images = torch.randn(samples, 3, side, side)
        data = TensorData(images, torch.randint(10, (samples,)))
        trainer.fit(model, torch.optim.SGD(model.parameters(), lr=0.01), cross_entropy, data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["steps", "copy", "norm", "scaling"])
    parser.add_argument("--loop", choices=["raw", "trainer"], default="raw")
    parser.add_argument("--model", default="quick")
    parser.add_argument("--on", default="cpu", help="the device")
    parser.add_argument("--block", type=int, default=100, help="steps of each of the three that are timed")
    parser.add_argument("--bytes", type=int, default=0)
    args, words = parser.parse_known_args()
    device = torch.device("cpu" if args.on == "cpu" else f"{args.on}:0")
    figures: dict[str, float] = {}
    if args.what == "steps":
        figures = (by_hand if args.loop == "raw" else by_trainer)(args, words, device)
    elif args.what == "copy":
        figures = copy(device, args.bytes)
    elif args.what == "norm":
        figures = norm(words)
    else:
        scaling(words[0], words[1:])
    if figures:
        print(json.dumps({name: round(value, 1) for name, value in figures.items()}), flush=True)


if __name__ == "__main__":
    main()
    sys.exit(0)
