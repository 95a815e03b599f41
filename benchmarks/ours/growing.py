"""A training without arithmetic: what a step costs by its number of tensors, ranks and samples.

By the Trainer, or by hand as the engines' documentation has it; the same model, data and optimizer.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from hvd_trainer import EngineOptions, LogOptions, Trainer, TrainerOptions, TrainOptions

BATCH = 8


class Many(nn.Module):
    """So many parameters of eight numbers each."""

    def __init__(self, tensors: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(8)) for _ in range(tensors))

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.stack(list(self.weights)).sum() * inputs.sum()


class Mapped(Dataset[tuple[Tensor, int]]):
    """Numbers in a file, which are read as they are needed."""

    def __init__(self, file: str, samples: int) -> None:
        self._numbers = np.memmap(file, dtype=np.float32, mode="r", shape=(samples,))

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.tensor(float(self._numbers[index])), 0


def mean_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs / 1000


def by_trainer(args: argparse.Namespace) -> None:
    options = TrainerOptions(
        EngineOptions(backend=args.backend),
        TrainOptions(epochs=1, max_steps=args.steps, batch_size=BATCH, workers=0),
        LogOptions(quiet=True),
    )
    with Trainer(options) as trainer:
        model = Many(args.tensors)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        trainer.fit(model, optimizer, mean_loss, Mapped(args.data, args.samples))


def by_hand(args: argparse.Namespace) -> None:
    data, bare = Mapped(args.data, args.samples), Many(args.tensors)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(bare.parameters(), lr=1e-6)
    model: nn.Module = bare
    sampler: Any
    if args.backend == "ddp":
        dist.init_process_group("gloo")
        sampler, model = DistributedSampler(data), nn.parallel.DistributedDataParallel(bare)
    else:
        import horovod.torch as hvd

        hvd.init()
        sampler = DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())
        hvd.broadcast_parameters(bare.state_dict(), root_rank=0)
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=bare.named_parameters())
    for number, (inputs, targets) in enumerate(DataLoader(data, BATCH, sampler=sampler), 1):
        optimizer.zero_grad()
        mean_loss(model(inputs), targets).backward()
        optimizer.step()
        if number == args.steps:
            break
    if args.backend == "ddp":
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--loop", choices=["trainer", "hand"], required=True)
    parser.add_argument("--backend", choices=["horovod", "ddp"], required=True)
    parser.add_argument("--tensors", type=int, required=True)
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--data", required=True, help="a file of as many 4-byte numbers")
    parser.add_argument("--steps", type=int, required=True)
    args = parser.parse_args()
    {"trainer": by_trainer, "hand": by_hand}[args.loop](args)


if __name__ == "__main__":
    main()
