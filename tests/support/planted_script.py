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


class Images(Dataset[tuple[Tensor, int]]):
    def __len__(self) -> int:
        return 8192

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if PLANTED == "disk":
            time.sleep(0.002)  # planted: disk
        if PLANTED == "two slow workers":
            time.sleep(0.06)  # planted: two slow workers
        if PLANTED == "slow decode":  # 2 s for a batch, so that a run has few steps
            sum(pixel * 31 % 251 for pixel in bytes(900_000))  # planted: slow decode
        if PLANTED == "decode":
            sum(pixel * 31 % 251 for pixel in bytes(20_000))  # planted: decode
        return torch.randn(64), index % 2


class SlowUpdate(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for _ in range(300):
            sum(range(5000))  # planted: update
        return super().step(closure)


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 2)))
    kind = SlowUpdate if PLANTED == "update" else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=0.01)
    data, workers = Images(), 2 if PLANTED == "two slow workers" else 0
    sampler: DistributedSampler[Any] = DistributedSampler(data)
    for epoch in range(100):
        sampler.set_epoch(epoch)
        for inputs, targets in DataLoader(data, batch_size=32, sampler=sampler, num_workers=workers):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            if PLANTED == "logging":
                time.sleep(0.05)  # planted: logging
            if PLANTED == "one rank" and rank == 1:
                time.sleep(0.05)  # planted: one rank
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
