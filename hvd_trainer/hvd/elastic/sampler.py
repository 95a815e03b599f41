"""Sampling that shares out the rest of an epoch anew when ranks have come or gone."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sized
from typing import Any

from torch.utils.data import Sampler

from hvd_trainer.hvd.common.basics import rank, size


class ElasticSampler(Sampler[int]):
    """Gives each rank its part of the samples that no rank has trained on in this epoch.

    Make it an attribute of the `TorchState`, call `record_batch` after each batch, and `set_epoch` at the end of
    each epoch.

    Args:
        dataset: of constant length.
        shuffle: whether to draw another order for each epoch.
        seed: of these orders; the same on all ranks.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch. To be called at the end of the last one, since it forgets what was trained on."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Note that each rank has trained on so many samples more."""
        self.processed_num += batch_size * self.num_replicas

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where another sampler was."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, and how many of its samples were trained on."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def reset(self) -> None:
        """Share out what is left of the epoch among the current ranks."""
        self.num_replicas = size()
        self.rank = rank()
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self.remaining_indices = order[self.processed_num :]
        self.num_samples = math.ceil(len(self.remaining_indices) / self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        """Return this rank's samples; the first ones again where they cannot be divided evenly."""
        filled = itertools.islice(itertools.cycle(self.remaining_indices), self.total_size)
        return itertools.islice(filled, self.rank, None, self.num_replicas)

    def __len__(self) -> int:
        return self.num_samples
