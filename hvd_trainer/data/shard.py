"""Sharding: which samples a rank takes. Pure index arithmetic, with the semantics of `DistributedSampler`.

There is one permutation per (seed, epoch), the same on all ranks. Rank r of n takes every n-th entry from r on, so
that one step of all ranks together is a contiguous slice of the permutation:

    order     7 2 9 4 | 0 5 1 8 | 3 6           2 ranks, batch 2: a step is a slice of 4
    rank 0    7   9   | 0   1   | 3
    rank 1      2   4 |   5   8 |   6

For one global batch size the samples of step t therefore do not depend on the number of ranks, and the position in
an epoch is one number: samples consumed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

EVALUATION = -1
"""The epoch in the seeds of random transforms during evaluation."""


def epoch_order(num_samples: int, *, seed: int, epoch: int, shuffle: bool = True) -> Tensor:
    """Return the order of all samples in one epoch, as `DistributedSampler` makes it: int64, (num_samples,)."""
    if not shuffle:
        return torch.arange(num_samples)
    return torch.randperm(num_samples, generator=torch.Generator().manual_seed(seed + epoch))


def training_share(order: Tensor, rank: int, size: int, *, consumed: int = 0) -> Tensor:
    """Return the samples that one rank still trains on, in order.

    Args:
        order: the epoch's order, from `epoch_order`.
        consumed: samples of this epoch that all ranks together have already trained on.

    Returns:
        int64 indices, as many on every rank: where the rest does not divide by `size`, the last ranks get samples
        from the beginning of the order again, so that no rank runs out of steps before another.
    """
    left = len(order) - consumed
    if left <= 0:
        return order[:0]
    per_rank = -(-left // size)
    end = consumed + per_rank * size
    whole = order if end <= len(order) else order.repeat(-(-end // len(order)))
    return whole[consumed:end][rank::size]


class BatchKey(NamedTuple):
    """The position of a batch, which seeds its random transforms."""

    position: int
    """samples of the epoch that all ranks have taken before this step"""
    part: int
    """the rank, or the virtual rank"""


class Chosen(NamedTuple):
    """The samples of one batch of a rank, by their indices."""

    key: BatchKey
    indices: Any
    """a tensor, or of a `DataLoader` a list of what its sampler gives"""
    numbers: list[int] | None = None
    """those that seed the samples' random transforms; None: their indices"""
    samples: int | None = None
    """how many count; None: all"""
    whole: int | None = None
    """samples of all shards in this pass; None: as many for each shard"""


def training_batches(
    shares: Sequence[tuple[int, Tensor]], *, size: int, batch_size: int, accumulate: int, consumed: int
) -> Iterator[Chosen]:
    """Yield one rank's batches of an epoch: those of each step together, part by part.

    Args:
        shares: the rank's parts of each global batch (its own number, or those of its virtual ranks), each with
            its result of `training_share`.
        size: number of parts of a global batch.
        batch_size: samples of one part and pass.
        accumulate: passes of one part in a step.
        consumed: as in `training_share`.
    """
    step, length = batch_size * accumulate, len(shares[0][1])
    for start in range(0, length, step):
        for part, share in shares:
            for first in range(start, min(start + step, length), batch_size):
                yield Chosen(BatchKey(consumed + first * size, part), share[first : first + batch_size])


def evaluation_share(num_samples: int, rank: int, size: int) -> Tensor:
    """Return the samples that one rank evaluates: never padded, so that each counts exactly once.

    Ranks may get unequal numbers, and none at all with more ranks than samples.
    """
    return torch.arange(min(rank, num_samples), num_samples, size)


def num_batches(num_samples: int, size: int, batch_size: int) -> int:
    """Return the batches per rank in one epoch; the last may be smaller."""
    per_rank = -(-num_samples // size)
    return -(-per_rank // batch_size)
