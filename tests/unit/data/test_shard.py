"""The index arithmetic of `data/shard.py`: `DistributedSampler`'s samples, in slices whatever the ranks."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

from hvd_trainer.data.shard import epoch_order, evaluation_share, num_batches, training_share

samples = st.integers(1, 200)
ranks = st.integers(1, 9)
seeds = st.integers(0, 2**31)
quick = settings(max_examples=150, deadline=None)


def shares(order: torch.Tensor, size: int, consumed: int = 0) -> list[list[int]]:
    return [training_share(order, rank, size, consumed=consumed).tolist() for rank in range(size)]


@quick
@given(num=samples, size=ranks, seed=seeds, epoch=st.integers(0, 50), shuffle=st.booleans())
def test_samples_equal_distributed_sampler(num: int, size: int, seed: int, epoch: int, shuffle: bool) -> None:
    order = epoch_order(num, seed=seed, epoch=epoch, shuffle=shuffle)
    for rank, mine in enumerate(shares(order, size)):
        sampler = DistributedSampler(range(num), size, rank, shuffle=shuffle, seed=seed)
        sampler.set_epoch(epoch)
        assert mine == list(sampler)


@quick
@given(num=samples, size=ranks, batch=st.integers(1, 16), seed=seeds)
def test_step_is_a_slice_of_the_order(num: int, size: int, batch: int, seed: int) -> None:
    order = epoch_order(num, seed=seed, epoch=0)
    mine, width = shares(order, size), size * batch
    for step in range(num // width):
        taken = sorted(i for share in mine for i in share[step * batch : (step + 1) * batch])
        assert taken == sorted(order[step * width : (step + 1) * width].tolist())


@quick
@given(num=samples, size=ranks, consumed=st.integers(0, 220), seed=seeds)
def test_resume_covers_exactly_the_rest(num: int, size: int, consumed: int, seed: int) -> None:
    """Whatever number of ranks trained on the first `consumed` samples, any other number takes the rest."""
    order = epoch_order(num, seed=seed, epoch=3)
    mine = shares(order, size, consumed)
    rest = order[consumed:].tolist()
    assert len({len(share) for share in mine}) == 1, "a rank would run out of steps before another"
    taken = [i for share in mine for i in share]
    assert len(taken) == -(-len(rest) // size) * size, "no more is repeated than fills the last step"
    again = (order.tolist() * (size + 1))[: len(taken) - len(rest)]
    assert sorted(taken) == sorted(rest + again), "and what is repeated is what the whole epoch repeats"


@quick
@given(num=st.integers(0, 200), size=ranks)
def test_evaluation_takes_each_sample_once(num: int, size: int) -> None:
    taken = [i for rank in range(size) for i in evaluation_share(num, rank, size).tolist()]
    assert sorted(taken) == list(range(num))


@quick
@given(num=samples, size=ranks, batch=st.integers(1, 40))
def test_num_batches_equals_the_share(num: int, size: int, batch: int) -> None:
    share = training_share(torch.arange(num), 0, size)
    assert num_batches(num, size, batch) == len(share.split(batch))


def test_shares_with_more_ranks_than_samples() -> None:
    assert shares(torch.arange(2), 5) == [[0], [1], [0], [1], [0]]
    assert [evaluation_share(2, rank, 5).tolist() for rank in range(5)] == [[0], [1], [], [], []]


def test_epoch_orders_differ_and_repeat() -> None:
    first, second = (epoch_order(50, seed=1, epoch=epoch) for epoch in (0, 1))
    assert not torch.equal(first, second)
    assert torch.equal(first, epoch_order(50, seed=1, epoch=0))
