"""A script for torch.distributed with a planted cause of slowness: `planted_script.py CAUSE`.

It knows nothing of hvd_trainer. The line to blame has a comment `# planted: CAUSE`.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

PLANTED = sys.argv[1]
EPOCH = 640 if PLANTED == "workers each epoch" else 8192
"""Samples of an epoch."""
if PLANTED == "anomaly":
    torch.autograd.set_detect_anomaly(True)  # planted: anomaly
if PLANTED == "deterministic":
    torch.use_deterministic_algorithms(True)  # planted: deterministic
if PLANTED == "float64":
    torch.set_default_dtype(torch.float64)  # planted: float64


class Images(Dataset[tuple[Tensor, int]]):
    def __len__(self) -> int:
        return EPOCH

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if PLANTED == "disk":
            time.sleep(0.002)  # planted: disk
        if PLANTED == "two slow workers":
            time.sleep(0.06)  # planted: two slow workers
        if PLANTED == "slow decode":  # 2 s for a batch, so that a run has few steps
            sum(pixel * 31 % 251 for pixel in bytes(900_000))  # planted: slow decode
        return torch.randn(64), index % 2


class SlowUpdate(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for _ in range(300):
            sum(range(5000))  # planted: update
        return super().step(closure)


def evaluate(model: Any) -> None:
    with torch.no_grad():
        for _ in range(100):
            model.module(torch.randn(200, 64))  # planted: rank 0 evaluates


def average(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)  # planted: per parameter
        parameter.grad /= dist.get_world_size()


def main() -> None:
    dist.init_process_group("gloo")
    rank, step = dist.get_rank(), 0
    layers: list[nn.Module] = [nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 2)]
    if PLANTED == "per parameter":
        layers[1:1] = [nn.Linear(256, 256) for _ in range(20)]
    model: nn.Module = nn.Sequential(*layers)
    if PLANTED == "search":
        model = DistributedDataParallel(model, find_unused_parameters=True)  # planted: search
    elif PLANTED != "per parameter":
        model = DistributedDataParallel(model)
    kind = SlowUpdate if PLANTED == "update" else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=0.01)
    data, workers = Images(), 2 if PLANTED in ("two slow workers", "workers each epoch") else 0
    sampler: DistributedSampler[Any] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=32, sampler=sampler, num_workers=workers)
    for epoch in range(1000):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:  # planted: workers each epoch
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            if PLANTED == "per parameter":
                average(model)
            optimizer.step()
            step += 1
            if PLANTED == "metric each batch":
                dist.all_reduce(loss.detach().clone())  # planted: metric each batch
            if PLANTED == "rank 0 evaluates" and rank == 0 and step % 4 == 0:
                evaluate(model)
            if PLANTED == "logging":
                time.sleep(0.05)  # planted: logging
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
