"""PyTorch `DataLoader`s of many kinds, over the numbers from 0 on."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

NUM = 22


class Numbers(Dataset[Any]):
    """Each sample is its number and a random one, and as the target a function of its number."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.tensor([float(index), random.random()]), torch.tensor(index % 3)

    def __len__(self) -> int:
        return NUM


class NumberStream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        numbers = Numbers()
        return (numbers[index] for index in range(NUM))


class Buckets(Sampler[Any]):
    """Batches of neighbours, some longer than others, in an order of the epoch. It has no length."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        batches = [[0, 1, 2, 3, 4, 5, 6], [7], [8, 9, 10, 11], [12, 13], [14, 15, 16, 17, 18, 19]]
        np.random.default_rng(self.epoch).shuffle(batches)
        return iter(batches)


class Pairs(Sampler[int]):
    """Each second number, in an order from NumPy's global generator."""

    def __init__(self) -> None: ...

    def __iter__(self) -> Iterator[int]:
        return iter((np.random.permutation(NUM // 2) * 2).tolist())

    def __len__(self) -> int:
        return NUM // 2


def first_three(samples: list[Any]) -> Any:
    """Leave out samples after the third of a batch."""
    inputs, targets = zip(*samples[:3], strict=True)
    return torch.stack(inputs), torch.stack(targets)


def _generator(seed: int = 5) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _tensors() -> TensorDataset:
    samples = [Numbers()[number] for number in range(NUM)]
    inputs, targets = (torch.stack(part) for part in zip(*samples, strict=True))
    inputs[:, 1] = 0
    return TensorDataset(inputs, targets)


def _weighted() -> WeightedRandomSampler:
    return WeightedRandomSampler([1.0 + number for number in range(NUM)], 30, generator=_generator())


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "in order": lambda: DataLoader(Numbers(), batch_size=6),
    "dropped": lambda: DataLoader(Numbers(), batch_size=6, drop_last=True),
    "tensors": lambda: DataLoader(_tensors(), batch_size=8, shuffle=True, generator=_generator()),
    "shuffled": lambda: DataLoader(Numbers(), batch_size=8, shuffle=True, generator=_generator()),
    "workers": lambda: DataLoader(Numbers(), batch_size=8, shuffle=True, generator=_generator(), num_workers=2),
    "weighted": lambda: DataLoader(Numbers(), batch_size=7, sampler=_weighted()),
    "subset": lambda: DataLoader(
        Numbers(), batch_size=4, sampler=SubsetRandomSampler(range(3, 14), generator=_generator())
    ),
    "list": lambda: DataLoader(Numbers(), batch_size=3, sampler=[5, 3, 1, 2, 4, 0, 21]),
    "buckets": lambda: DataLoader(Numbers(), batch_sampler=Buckets()),
    "batches": lambda: DataLoader(
        Numbers(), batch_sampler=BatchSampler(SequentialSampler(range(NUM)), 5, drop_last=False)
    ),
}
"""Those whose order PyTorch gives alike in each process."""
