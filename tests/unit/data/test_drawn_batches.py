"""What a `DataLoader` draws is what a training gets: in one process, and as shares of many."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import pytest
import torch
import trainings
from loaders import LOADERS, NUM, Buckets, Numbers, NumberStream, Pairs, first_three
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, Sampler

from hvd_trainer.backends import Backend
from hvd_trainer.data import (
    DataShard,
    LoaderPlan,
    draw_batches,
    make_loader,
    mean_samples,
    samples_in,
    samples_taken,
)
from hvd_trainer.data.batch import CountedBatch
from hvd_trainer.data.data_loader import DrawnBatches
from hvd_trainer.errors import DataError, OptionError

EPOCHS = range(3)


def drawn_by(loader: DataLoader[Any], backend: Backend) -> DrawnBatches:
    drawn = draw_batches(loader, backend, seed=3)
    assert drawn is not None
    return drawn


def numbers_of(batches: Any) -> list[list[int]]:
    return [inputs[:, 0].int().tolist() for inputs, _ in batches]


def read_by(loader: DataLoader[Any], backend: Backend, shard: DataShard, **plan: Any) -> Any:
    plan = {"batch_size": 1, "seed": 3, "shard": shard, "drawn": draw_batches(loader, backend, 3), **plan}
    return make_loader(loader, backend, LoaderPlan(**plan))


@pytest.mark.parametrize("kind", LOADERS)
def test_order_is_that_of_pytorch(kind: str, lone_backend: Backend) -> None:
    """In each epoch, also where the generator of a sampler goes on from one to the next."""
    plain, loader = LOADERS[kind](), LOADERS[kind]()
    ours = read_by(loader, lone_backend, DataShard(0, 1))
    for epoch in EPOCHS:
        if isinstance(plain.batch_sampler, Buckets):
            plain.batch_sampler.set_epoch(epoch)
        assert numbers_of(ours.epoch(epoch)) == numbers_of(plain)


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("size", [3, 4])
def test_shares_make_the_batches(kind: str, size: int, lone_backend: Backend) -> None:
    """Each sample counts once, and a rank without one takes one that does not count."""
    whole = numbers_of(read_by(LOADERS[kind](), lone_backend, DataShard(0, 1)).epoch(1))
    shares = [list(read_by(LOADERS[kind](), lone_backend, DataShard(rank, size)).epoch(1)) for rank in range(size)]
    for batch, *parts in zip(whole, *shares, strict=True):
        counts = [samples_in(part) for part in parts]
        counted = [chain.from_iterable(numbers_of([part])) for part in parts]
        taken = [list(numbers)[:count] for numbers, count in zip(counted, counts, strict=True)]
        assert sorted(chain.from_iterable(taken)) == sorted(batch)
        assert max(counts) - min(counts) <= 1
        for part in parts:
            assert len(part[0]) >= 1
            assert mean_samples(part) == len(batch) / size
            assert samples_taken(part, size) == len(batch)


@pytest.mark.parametrize("kind", LOADERS)
def test_virtual_ranks_share_the_batches(kind: str, lone_backend: Backend) -> None:
    """Those of a step come part by part, and their numbers add up to those of the step."""
    whole = numbers_of(read_by(LOADERS[kind](), lone_backend, DataShard(0, 1)).epoch(0))
    plan = {"virtual_ranks": 4, "accumulate": 2}
    passes = list(read_by(LOADERS[kind](), lone_backend, DataShard(0, 1), **plan).epoch(0))
    for number, step in enumerate(range(0, len(whole), 2)):
        batches = whole[step : step + 2]
        own = passes[number * 8 : number * 8 + 4 * len(batches)]
        assert sum(samples_taken(part, 1) for part in own) == sum(map(len, batches))
        assert sum(samples_in(part) for part in own) == sum(map(len, batches))
        for place, batch in enumerate(batches):
            for rank in range(4):
                part = own[rank * len(batches) + place]
                assert numbers_of([part])[0][: samples_in(part)] == batch[rank::4]


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("kind", LOADERS)
def test_the_rest_of_an_epoch_is_the_same(kind: str, size: int, lone_backend: Backend) -> None:
    """Another process takes up the states of the generators, and the samples' random numbers are the same ones."""
    first = read_by(LOADERS[kind](), lone_backend, DataShard(0, size))
    for epoch in EPOCHS:
        whole = list(first.epoch(epoch))
    consumed = 0
    for done, batch in enumerate(whole):
        again = read_by(LOADERS[kind](), lone_backend, DataShard(0, size))
        again.plan.drawn.load_state_dict(first.plan.drawn.state_dict())
        rest = list(again.epoch(EPOCHS[-1], consumed))
        assert [part[0].tolist() for part in rest] == [part[0].tolist() for part in whole[done:]]
        consumed += samples_taken(batch, size)
    assert list(again.epoch(EPOCHS[-1], consumed)) == []


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("size", [1, 3, 4])
def test_an_evaluation_has_each_sample_once(kind: str, size: int, lone_backend: Backend) -> None:
    shares = [
        list(read_by(LOADERS[kind](), lone_backend, DataShard(rank, size), shuffle=False).evaluation())
        for rank in range(size)
    ]
    count = drawn_by(LOADERS[kind](), lone_backend).num_samples
    numbers = list(chain.from_iterable(chain.from_iterable(map(numbers_of, shares))))
    assert len(numbers) == count
    if kind == "in order":
        assert sorted(numbers) == list(range(NUM))


def test_a_sample_that_is_drawn_twice_differs(lone_backend: Backend) -> None:
    """Their seeds are those of their places in the epoch."""
    batches = read_by(LOADERS["weighted"](), lone_backend, DataShard(0, 1)).epoch(0)
    samples = [tuple(row) for inputs, _ in batches for row in inputs.tolist()]
    assert len({number for number, _ in samples}) < len(samples) == len(set(samples))


def test_generators_are_as_before(lone_backend: Backend) -> None:
    """Those of a user's loader go on with the user's numbers, and so does the global one."""
    loader = LOADERS["shuffled"]()
    assert loader.generator is not None
    before = loader.generator.get_state(), torch.get_rng_state()
    list(read_by(loader, lone_backend, DataShard(0, 1)).epoch(0))
    assert torch.equal(loader.generator.get_state(), before[0])
    assert torch.equal(torch.get_rng_state(), before[1])


def test_a_sampler_of_global_numbers_has_an_order_per_epoch(lone_backend: Backend) -> None:
    drawn = drawn_by(DataLoader(Numbers(), batch_size=4, sampler=Pairs()), lone_backend)
    epochs = [[one.indices for one in drawn.training(epoch, [0], 1)] for epoch in (0, 1, 0)]
    assert epochs[0] == epochs[2] != epochs[1]


def test_workers_are_prepared_by_the_users_function(lone_backend: Backend) -> None:
    loader = DataLoader(Told(), batch_size=4, num_workers=2, worker_init_fn=tell, timeout=60)
    told = [inputs.tolist() for inputs, _ in read_by(loader, lone_backend, DataShard(0, 1)).epoch(0)]
    assert told == [[7.0] * 4] * 2
    assert read_by(loader, lone_backend, DataShard(0, 1), num_workers=0).num_workers == 0


class Told(Numbers):
    number = 0.0

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(Told.number), torch.tensor(0)


def tell(worker: int) -> None:
    Told.number = 7.0


def test_a_collate_of_the_loader_is_called(lone_backend: Backend) -> None:
    """Batches are weighed by the samples that it leaves; a share that does not count weighs nothing."""
    loader = DataLoader(Numbers(), batch_sampler=[[0, 1, 2, 3, 4, 5, 6, 7, 8, 9], [10]], collate_fn=first_three)
    batches = list(read_by(loader, lone_backend, DataShard(1, 2)).epoch(0))
    assert numbers_of(batches) == [[1, 3, 5], [10]]
    assert [samples_in(batch) for batch in batches] == [3, 0]
    assert all(isinstance(batch, CountedBatch) for batch in batches)


@pytest.mark.parametrize(("drop_last", "kept", "workers"), [(False, NUM, 0), (True, 20, 2)])
def test_a_loader_of_a_stream(drop_last: bool, kept: int, workers: int, lone_backend: Backend) -> None:
    loader = DataLoader(NumberStream(), batch_size=10, drop_last=drop_last, num_workers=workers)
    numbers = chain.from_iterable(numbers_of(read_by(loader, lone_backend, DataShard(0, 1)).epoch(0)))
    assert list(numbers) == list(range(kept))


class OwnNumbers(Sampler[int]):
    """Draws from a generator that nobody can know of."""

    def __init__(self) -> None:
        self.rounds = 0

    def __iter__(self) -> Iterator[int]:
        self.rounds += 1
        return iter(range(self.rounds, NUM))


class Endless(Sampler[int]):
    def __init__(self) -> None: ...

    def __iter__(self) -> Iterator[int]:
        while True:
            yield 1


@pytest.mark.parametrize(
    ("loader", "error"),
    [
        (lambda: DataLoader(Numbers(), sampler=OwnNumbers()), "BatchSampler with OwnNumbers gave other samples"),
        (lambda: DataLoader(Numbers(), sampler=Endless()), "gave more than 2,200 samples, 100 times those of the"),
        (lambda: DataLoader(Numbers(), batch_sampler=[[1], []]), "list gave an empty batch: leave it out"),
        (lambda: DataLoader(Numbers(), batch_size=40, drop_last=True), "gave no batch: .* leave out drop_last"),
    ],
)
def test_a_sampler_that_cannot_be_kept(
    loader: Callable[[], DataLoader[Any]], error: str, lone_backend: Backend
) -> None:
    with pytest.raises(DataError, match=error):
        draw_batches(loader(), lone_backend, 0)


class OwnBatches(DataLoader[Any]):
    def __iter__(self) -> Any:
        return iter([])


def fit(loader: DataLoader[Any], val_data: Any = None, *, options: Any = None, **how: Any) -> Any:
    model = nn.Linear(2, 3)
    return trainings.fit(trainings.options_of(epochs=1, **(options or {})), model, loader, val_data, **how)


@pytest.mark.parametrize(
    ("loader", "options", "error"),
    [
        (lambda: OwnBatches(Numbers()), {}, "OwnBatches makes its batches in an __iter__ of its own"),
        (lambda: DataLoader(Numbers(), batch_size=None), {}, "has batch_size=None, so its data set gives ready"),
        (
            lambda: DataLoader(Numbers(), sampler=DistributedSampler(Numbers(), num_replicas=2, rank=0)),
            {},
            "has a DistributedSampler, and the trainer itself shares .* leave the sampler out",
        ),
        (lambda: DataLoader(Numbers(), in_order=False), {}, "has in_order=False"),
        (LOADERS["shuffled"], {"global_batch_size": 16}, "--global-batch-size 16: by its DataLoader a step has 8"),
        (LOADERS["shuffled"], {"batch_size": 32}, "--batch-size 32: by its DataLoader it is 8"),
    ],
)
def test_what_a_loader_asks_for_is_refused_by_name(
    loader: Callable[[], DataLoader[Any]], options: dict[str, Any], error: str
) -> None:
    with pytest.raises(OptionError, match=error):
        fit(loader(), options=options)


def test_all_mistakes_of_loaders_are_told_at_once() -> None:
    with pytest.raises(OptionError, match=r"(?s)batch_size=None.*in_order=False.*collate= is for data sets"):
        fit(DataLoader(Numbers(), batch_size=None), DataLoader(Numbers(), in_order=False), collate=first_three)


@pytest.mark.parametrize("asked", [{}, {"global_batch_size": 16}, {"batch_size": 8}])
def test_options_that_agree_with_the_loader_are_no_mistake(asked: dict[str, Any]) -> None:
    """Tools repeat a run's sizes as options."""
    history = fit(LOADERS["shuffled"](), options={"accumulate": 2, **asked})
    assert history[-1]["global_batch_size"] == 16
    assert history[-1]["step"] == 2


def test_an_epoch_goes_on_with_batches_of_another_size(lone_backend: Backend) -> None:
    """The order is the sampler's; a batch sampler's batches are its own, and none begins elsewhere."""
    loader = DataLoader(Numbers(), batch_size=4)
    assert [one.indices for one in drawn_by(loader, lone_backend).training(0, [0], 1, consumed=18)] == [
        [18, 19, 20, 21]
    ]
    with pytest.raises(DataError, match="after 3 samples of the epoch, and Buckets begins no batch there"):
        drawn_by(DataLoader(Numbers(), batch_sampler=Buckets()), lone_backend).training(0, [0], 1, consumed=3)


def test_validation_by_a_loader(lone_backend: Backend) -> None:
    """It has a batch size and a sampler of its own, and its samples are the same in each evaluation."""
    val = DataLoader(Numbers(), batch_size=5, sampler=Pairs())
    history = fit(DataLoader(Numbers(), batch_size=11), val, metrics={"count": lambda out, y: y * 0.0 + 1.0})
    assert history[-1]["val_count"] == 1.0
    ours = read_by(val, lone_backend, DataShard(0, 1), shuffle=False)
    assert numbers_of(ours.evaluation()) == numbers_of(ours.evaluation())
