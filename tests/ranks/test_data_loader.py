"""Trainings on a `DataLoader`: as one process trains on it, on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from bit_jobs import OfNumber, loaded
from combinations import case
from launchers import in_ranks
from loaders import LOADERS, NUM, Buckets, Numbers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Sampler
from trainings import Trained, train

from hvd_trainer.backends import create
from hvd_trainer.config.options import EngineOptions
from hvd_trainer.data import draw_batches
from hvd_trainer.errors import CheckpointError, DataError

pytestmark = pytest.mark.warm

ENGINES = [case("ddp"), case("horovod")]
KINDS = ["tensors", "weighted", "buckets", "workers", "list"]
EPOCHS = 2


def trained_by_pytorch(kind: str, accumulate: int) -> tuple[dict[str, Tensor], float]:
    """Train in a loop of one's own, in one process; return the weights, and the last epoch's accuracy."""
    torch.manual_seed(0)
    model, loader = OfNumber(), LOADERS[kind]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for epoch in range(EPOCHS):
        if isinstance(loader.batch_sampler, Buckets):
            loader.batch_sampler.set_epoch(epoch)
        batches, right = list(loader), 0
        for first in range(0, len(batches), accumulate):
            step = batches[first : first + accumulate]
            samples = sum(len(targets) for _, targets in step)
            for inputs, targets in step:
                outputs = model(inputs)
                (cross_entropy(outputs, targets, reduction="sum") / samples).backward()
                right += int((outputs.argmax(1) == targets).sum())
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict(), right / sum(len(targets) for _, targets in batches)


def train_all(backend: str, accumulate: int) -> dict[str, Trained]:
    return {kind: train(backend, **loaded(kind, accumulate=accumulate, timeout_s=60)) for kind in KINDS}


@pytest.mark.parametrize("backend", ENGINES)
@pytest.mark.parametrize(("size", "accumulate"), [(1, 1), (3, 1), (4, 2)])
def test_a_loader_trains_as_in_one_process(backend: str, size: int, accumulate: int) -> None:
    """Within 1e-5, for other orders of sums: as PyTorch's own loop. Ranks may have no sample of a batch."""
    for rank in in_ranks(size, train_all, backend, accumulate):
        for kind, run in rank.items():
            alone, right = trained_by_pytorch(kind, accumulate)
            torch.testing.assert_close({kind: run.model.state_dict()}, {kind: alone}, rtol=1e-5, atol=1e-5)
            count = sum(len(batch) for batch in LOADERS[kind]().batch_sampler or ())
            assert run.records("samples") == [[count], [2 * count]]
            assert run.history.end["train_right"] == pytest.approx(right)
            assert 0 <= run.history.end["val_right"] <= 1


def in_stages() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3))


def train_stages(kind: str) -> list[list[Any]]:
    how = {"epochs": EPOCHS, "stages": 2, "chunks": 2}
    return train("ddp", in_stages, LOADERS[kind](), **how).records("samples", "train_loss")


@pytest.mark.parametrize("kind", ["tensors", "batches"])
def test_stages_share_the_batches(kind: str) -> None:
    """The second copy of the model has no sample of some batches, and its stages meet all the same."""
    first, *others = in_ranks(4, train_stages, kind)
    assert first[-1][0] == EPOCHS * NUM
    assert others == [first] * 3


class OfRank(Sampler[int]):
    """Shards by itself, as a sampler of a user's own may do."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank, NUM, 3))


def draw_by_rank() -> str:
    with create(EngineOptions(backend="ddp", timeout_s=30)) as backend:
        loader = DataLoader(Numbers(), batch_size=2, sampler=OfRank(backend.world.rank))
        with pytest.raises(DataError) as raised:
            draw_batches(loader, backend, 0)
    return str(raised.value)


def test_a_sampler_that_shards_is_refused() -> None:
    for error in in_ranks(3, draw_by_rank):
        assert error.startswith("BatchSampler with OfRank gave each rank other samples")


def weigh(batch: Any) -> Tensor:
    return batch[1].sum()


def weighed(outputs: Tensor, targets: Tensor) -> Tensor:
    return (cross_entropy(outputs, targets, reduction="none") * targets).sum() / targets.sum()


def train_weighed(backend: str) -> dict[str, Any]:
    loader = DataLoader(Numbers(), batch_sampler=[[2, 5, 8, 11, 13], [20, 1, 5]])
    sgd = partial(torch.optim.SGD, lr=0.5)
    trained = train(backend, OfNumber, loader, optimizer=sgd, epochs=1, loss=weighed, weight=weigh)
    return dict(trained.model.state_dict())


@pytest.mark.parametrize("backend", ENGINES)
def test_a_share_that_does_not_count_weighs_nothing(backend: str) -> None:
    """With a user's weight, too: it would count the sample as often as there are ranks without one."""
    (alone,) = in_ranks(1, train_weighed, backend)
    for ends in in_ranks(4, train_weighed, backend):
        torch.testing.assert_close(ends, alone, rtol=1e-5, atol=1e-5)


def stopped_in_the_third_epoch(folder: str) -> bool:
    """Return whether a run that is stopped and resumed ends with the weights of one that is not."""
    how = {"epochs": 3, "save_every_steps": 1}
    whole = train("ddp", **loaded("shuffled", log_dir=f"{folder}/whole", **how))
    train("ddp", **loaded("shuffled", log_dir=f"{folder}/parts", stop_after=8, **how))
    resumed = train("ddp", **loaded("shuffled", log_dir=f"{folder}/parts", resume="auto", **how))
    return whole.weights == resumed.weights


@pytest.mark.parametrize("size", [1, 3])
def test_the_generator_of_a_random_sampler_is_resumed(size: int, tmp_path: Any) -> None:
    """From the first epoch alone a new process knows the order of the first two."""
    assert in_ranks(size, stopped_in_the_third_epoch, str(tmp_path)) == [True] * size


def resume_with_another(folder: str) -> str:
    """Resume a run whose loader has no generator with one that has, and by a new epoch."""
    log = {"log_dir": folder, "save_every_steps": 1}
    train("ddp", **loaded("list", stop_after=2, **log))
    with pytest.raises(CheckpointError) as raised:
        train("ddp", **loaded("weighted", resume="auto", **log))
    train("ddp", **loaded("weighted", resume="auto", resume_partial=("data",), **log))
    return str(raised.value)


def test_another_sampler_begins_the_epoch_again(tmp_path: Any) -> None:
    for error in in_ranks(2, resume_with_another, str(tmp_path)):
        assert "it has no sampler (to reset it: --resume-partial data)" in error
