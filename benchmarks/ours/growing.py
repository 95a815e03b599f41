"""A training with hardly any arithmetic: what a step costs by its number of tensors, ranks and samples.

By the Trainer, or by hand as the engines' documentation has it; the same model, data and optimizer. It trains a
linear layer on samples in memory, or, with --data and --tensors, many small tensors on samples in a file.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from itertools import count, islice
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

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


class Parts(NamedTuple):
    """The model, loss function and data set of a training."""

    model: nn.Module
    loss: Callable[[Tensor, Tensor], Tensor]
    data: Dataset[Any]


def parts(args: argparse.Namespace) -> Parts:
    if args.data is None:
        inputs, targets = torch.randn(2, args.samples, 8)
        return Parts(nn.Linear(8, 8), nn.functional.mse_loss, TensorDataset(inputs, targets))
    return Parts(Many(args.tensors), mean_loss, Mapped(args.data, args.samples))


def by_trainer(args: argparse.Namespace) -> None:
    options = TrainerOptions(
        EngineOptions(backend=args.backend),
        TrainOptions(epochs=args.steps, max_steps=args.steps, batch_size=BATCH, workers=0),
        LogOptions(quiet=True),
    )
    with Trainer(options) as trainer:
        model, loss, data = parts(args)
        trainer.fit(model, torch.optim.SGD(model.parameters(), lr=1e-6), loss, data)


def by_hand(args: argparse.Namespace) -> None:
    bare, loss, data = parts(args)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(bare.parameters(), lr=1e-6)
    model: nn.Module = bare
    sampler: DistributedSampler[Any] | None = None
    if args.backend == "ddp":
        dist.init_process_group("gloo")
        sampler, model = DistributedSampler(data), nn.parallel.DistributedDataParallel(bare)
    elif args.backend == "horovod":
        import horovod.torch as hvd

        hvd.init()
        sampler = DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())
        hvd.broadcast_parameters(bare.state_dict(), root_rank=0)
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=bare.named_parameters())
    loader = DataLoader(data, BATCH, sampler=sampler, shuffle=sampler is None)
    for inputs, targets in islice(batches(loader, sampler), args.steps):
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        optimizer.step()
    if args.backend == "ddp":
        dist.destroy_process_group()


def batches(loader: DataLoader[Any], sampler: DistributedSampler[Any] | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches of one epoch after another, without end."""
    for epoch in count():
        if sampler is not None:
            sampler.set_epoch(epoch)
        yield from loader


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--loop", choices=["trainer", "hand"], required=True)
    parser.add_argument("--backend", choices=["horovod", "ddp", "single"], required=True)
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--data", help="a file of as many 4-byte numbers, for --tensors")
    parser.add_argument("--tensors", type=int, help="parameters of eight numbers each, instead of a linear layer")
    parser.add_argument("--steps", type=int, required=True)
    args = parser.parse_args()
    {"trainer": by_trainer, "hand": by_hand}[args.loop](args)


if __name__ == "__main__":
    main()
