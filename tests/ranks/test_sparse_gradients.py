"""Sparse gradients on Horovod and in `hvd`: averaged also where a rank has none; nothing stays on the model."""

from __future__ import annotations

import gc
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from launchers import in_ranks, requires
from torch import nn
from trainings import train

from hvd_trainer import TensorData, hvd
from hvd_trainer.backends import Backend, EngineOptions, create
from hvd_trainer.backends.horovod_reducer import HorovodSparseReducer
from hvd_trainer.backends.horovod_waiter import Waiter

pytestmark = pytest.mark.warm


class Tables(nn.Module):
    """Embeddings with sparse gradients of which each rank may use others; `tied` has dense ones as an output."""

    def __init__(self) -> None:
        super().__init__()
        names = ("first", "last", "all", "tied", "unused")
        self.tables = nn.ModuleDict({name: nn.Embedding(4, 2, sparse=True) for name in names})
        for parameter in self.parameters():
            nn.init.ones_(parameter)

    def used_by(self, rank: int) -> torch.Tensor:
        total = self.tables["all"](torch.tensor([rank, rank])).sum()
        total = total + self.tables["first" if rank == 0 else "last"](torch.tensor([1])).sum()
        tied = self.tables["tied"]
        return total + (tied(torch.tensor([3])) if rank == 0 else torch.ones(1, 2) @ tied.weight.t()).sum()


def steps(backend: Backend, model: Tables) -> dict[str, list[float]]:
    _, optimizer = backend.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    for _ in range(2):
        optimizer.zero_grad()
        model.used_by(backend.world.rank).backward()
        backend.step(optimizer)
    assert model.tables["unused"].weight.grad is None
    return {name: table.weight[:, 0].tolist() for name, table in model.tables.items()}


def train_tables() -> dict[str, list[float]]:
    """Train, and compute a gradient after the end, when nothing has collected garbage."""
    gc.disable()
    model = Tables()
    with create(EngineOptions(backend="horovod", find_unused_parameters=True)) as backend:
        weights = steps(backend, model)
    model.used_by(0).backward()
    return weights


@requires("horovod")
def test_rank_may_lack_a_sparse_gradient() -> None:
    """It asked for an all-reduce of zeros, and the others for a gathering of rows: all hung."""
    one, *others = in_ranks(2, train_tables)
    assert others == [one]
    assert one == {
        "first": [1.0, 0.0, 1.0, 1.0],
        "last": [1.0, 0.0, 1.0, 1.0],
        "all": [-1.0, -1.0, 1.0, 1.0],
        "tied": [0.0, 0.0, 0.0, -1.0],
        "unused": [1.0] * 4,
    }


class OwnCompressor(hvd.Compression.none):  # type: ignore[name-defined,misc]  # a class
    """A compressor of the user's, with which each gradient travels by itself."""


def train_by_hvd(compression: type) -> dict[str, list[float]]:
    """Train as `train_tables` does; `sometimes` gets a gradient in the second step alone, on the last rank."""
    hvd.init()
    model, rank = Tables(), hvd.rank()
    sometimes = nn.Embedding(4, 2, sparse=True)
    nn.init.ones_(sometimes.weight)
    named = [*model.named_parameters(), ("sometimes", sometimes.weight)]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([parameter for _, parameter in named], lr=1.0), named, compression
    )
    for step in range(2):
        optimizer.zero_grad()
        loss = model.used_by(min(rank, 1))
        if step and rank == hvd.size() - 1:
            loss = loss + sometimes(torch.tensor([2])).sum()
        loss.backward()
        optimizer.step()
    weights = {name: parameter[:, 0].tolist() for name, parameter in named}
    hvd.shutdown()
    return weights


@pytest.mark.parametrize("compression", [hvd.Compression.none, OwnCompressor])
@pytest.mark.parametrize("size", [3, 4])
def test_rank_may_lack_a_sparse_gradient_of_hvd(size: int, compression: type) -> None:
    """It asked for an all-reduce of zeros, and the others for a gathering of rows: all hung."""
    one, *others = in_ranks(size, train_by_hvd, compression)
    assert others == [one] * (size - 1)
    first, last = 1 / size, (size - 1) / size  # how many ranks use the table
    assert one == {
        "tables.first.weight": pytest.approx([1.0, 1 - 2 * first, 1.0, 1.0]),
        "tables.last.weight": pytest.approx([1.0, 1 - 2 * last, 1.0, 1.0]),
        "tables.all.weight": pytest.approx([1 - 4 * first, 1 - 4 * last, 1.0, 1.0]),
        "tables.tied.weight": pytest.approx([*[1 - 2 * last] * 3, -1.0]),
        "tables.unused.weight": [1.0] * 4,
        "sometimes": pytest.approx([1.0, 1.0, 1 - first, 1.0]),
    }


class Bags(nn.Module):
    """An embedding with sparse gradients; optionally a layer with dense ones, and one that is frozen."""

    def __init__(self, dense: bool) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(30, 4, sparse=True)
        self.frozen = nn.Embedding(30, 4, sparse=True).requires_grad_(False)
        self.layer = nn.Linear(4, 4) if dense else nn.Identity()
        self.double()

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.layer(self.table(words) + self.frozen(words).mean(1))


def train_bags(backend: str) -> list[dict[str, torch.Tensor]]:
    """Train models with sparse gradients, in one pass per step and in three."""
    words = torch.randint(0, 30, (452, 6), generator=torch.Generator().manual_seed(2))
    data, sgd = TensorData(words, words[:, 0] % 4), partial(torch.optim.SGD, lr=0.5)
    ways = (True, 1), (True, 3), (False, 1)
    return [
        train(
            backend, partial(Bags, dense), data, optimizer=sgd, epochs=1, global_batch_size=36, accumulate=passes
        ).model.state_dict()
        for dense, passes in ways
    ]


@requires("horovod")
@pytest.mark.parametrize("size", [2, 3])
def test_engines_average_sparse_gradients(size: int) -> None:
    first, *others = (rank for backend in ("horovod", "ddp") for rank in in_ranks(size, train_bags, backend))
    for other in others:
        torch.testing.assert_close(other, first, rtol=1e-12, atol=1e-12)


def test_wait_for_sparse_gradients_has_a_limit() -> None:
    """Horovod's own `synchronize` waited for ever for a rank that was stuck."""
    hvd: Any = SimpleNamespace(
        size=lambda: 2,
        allgather_async=lambda tensor, name: 1,
        poll=lambda handle: False,
        mpi_ops=SimpleNamespace(mpi_lib=SimpleNamespace()),
    )
    table = nn.Embedding(3, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    dense: Any = SimpleNamespace(finish=lambda: None)
    reducer = HorovodSparseReducer(hvd, Waiter(hvd, 0.1), {"table": table.weight}, dense, None)
    with pytest.raises(TimeoutError, match=r"within 0\.1 s.*--startup-timeout-s"):
        reducer.finish()
