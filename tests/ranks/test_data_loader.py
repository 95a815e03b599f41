"""Trainings on a `DataLoader`: as one process trains on it, on any number of ranks, and after a resume."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from combinations import case
from launchers import run_ranks
from loaders import LOADERS, NUM, Buckets, Numbers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Sampler
from trainings import StopAfter, StoppedError, digest, options_of

from hvd_trainer import Trainer
from hvd_trainer.backends import create
from hvd_trainer.config.options import EngineOptions
from hvd_trainer.data import draw_batches
from hvd_trainer.errors import CheckpointError, DataError
from hvd_trainer.launch.world import detect

pytestmark = pytest.mark.warm


def of_rank(function: Callable[..., Any], *args: Any) -> tuple[int, Any]:
    """Return this rank's number, and what a function returns on it."""
    return detect(os.environ).rank, function(*args)


ENGINES = [case("ddp"), case("horovod")]
KINDS = ["tensors", "weighted", "buckets", "workers", "list"]
EPOCHS = 2


class OfNumber(nn.Module):
    """A model of the sample's number alone: its random one depends on the seed."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layers(inputs[:, :1] / NUM)
        return outputs


def train(backend: str, kind: str, *, stop_after: int | None = None, **options: Any) -> dict[str, Any]:
    """Train on a loader until a step or the end; return what this rank then has."""
    with Trainer(options_of(backend, epochs=EPOCHS, **options)) as trainer:
        model = OfNumber()
        start = {name: value.clone() for name, value in model.state_dict().items()}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        data, val_data = LOADERS[kind](), DataLoader(Numbers(), batch_size=5)
        history: Any = []
        with suppress(StoppedError):
            metrics = {"right": lambda outputs, targets: (outputs.argmax(1) == targets).float()}
            callbacks = [StopAfter(stop_after)]
            history = trainer.fit(
                model, optimizer, cross_entropy, data, val_data, metrics=metrics, callbacks=callbacks
            )
    figures = [{key: record[key] for key in ("step", "samples", "train_right", "val_right")} for record in history]
    return {"start": start, "end": model.state_dict(), "figures": figures}


def trained_by_pytorch(kind: str, start: dict[str, Tensor], accumulate: int) -> tuple[dict[str, Tensor], float]:
    """Train in a loop of one's own, in one process; return the weights, and the last epoch's accuracy."""
    model, loader = OfNumber(), LOADERS[kind]()
    model.load_state_dict(start)
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


def train_all(backend: str, accumulate: int) -> dict[str, Any]:
    return {kind: train(backend, kind, accumulate=accumulate, timeout_s=60) for kind in KINDS}


@pytest.mark.parametrize("backend", ENGINES)
@pytest.mark.parametrize(("size", "accumulate"), [(1, 1), (2, 2), (3, 1), (4, 2)])
def test_a_loader_trains_as_in_one_process(backend: str, size: int, accumulate: int) -> None:
    """Within 1e-5, for other orders of sums: as PyTorch's own loop. Ranks may have no sample of a batch."""
    for rank in run_ranks(of_rank, num_processes=size, args=(train_all, backend, accumulate)):
        for kind, run in rank.items():
            alone, right = trained_by_pytorch(kind, run["start"], accumulate)
            torch.testing.assert_close({kind: run["end"]}, {kind: alone}, rtol=1e-5, atol=1e-5)
            count = sum(len(batch) for batch in LOADERS[kind]().batch_sampler or ())
            assert [record["samples"] for record in run["figures"]] == [count, 2 * count]
            assert run["figures"][-1]["train_right"] == pytest.approx(right)
            assert 0 <= run["figures"][-1]["val_right"] <= 1


def resume(backend: str, kind: str, folder: str, **options: Any) -> dict[int, str]:
    """Train undisturbed, and in two parts that are cut after each of some steps; return digests of weights."""
    whole = train(backend, kind, **options)
    ends = {0: digest(whole["end"])}
    for step in (1, 3, whole["figures"][0]["step"], whole["figures"][0]["step"] + 1):
        log = {"log_dir": f"{folder}/{step}", "save_every_steps": 1, **options}
        train(backend, kind, stop_after=step, **log)
        ends[step] = digest(train(backend, kind, resume="auto", **log)["end"])
    return ends


@pytest.mark.parametrize("backend", ENGINES)
@pytest.mark.parametrize("kind", ["weighted", "buckets", "workers"])
@pytest.mark.parametrize("size", [1, 3])
def test_a_resume_is_exact(backend: str, kind: str, size: int, tmp_path: Path) -> None:
    for ends in run_ranks(of_rank, num_processes=size, args=(resume, backend, kind, str(tmp_path))):
        assert len(set(ends.values())) == 1, ends


def train_reproducibly(backend: str, kind: str) -> str:
    return digest(train(backend, kind, reproducible=4)["end"])


@pytest.mark.parametrize("kind", ["weighted", "buckets"])
def test_virtual_ranks_have_the_same_bits(kind: str) -> None:
    ends = {
        digest
        for backend, size in (("ddp", 1), ("ddp", 2), ("horovod", 4))
        for digest in run_ranks(of_rank, num_processes=size, args=(train_reproducibly, backend, kind))
    }
    assert len(ends) == 1


def train_stages(kind: str) -> dict[str, Any]:
    with Trainer(options_of("ddp", epochs=EPOCHS, stages=2, chunks=2)) as trainer:
        model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        history = trainer.fit(model, optimizer, cross_entropy, LOADERS[kind]())
    return dict(history[-1])


@pytest.mark.parametrize("kind", ["tensors", "batches"])
def test_stages_share_the_batches(kind: str) -> None:
    """The second copy of the model has no sample of some batches, and its stages meet all the same."""
    records = run_ranks(
        of_rank,
        num_processes=4,
        args=(
            train_stages,
            kind,
        ),
    )
    assert {record["samples"] for record in records} == {EPOCHS * NUM}
    assert len({record["train_loss"] for record in records}) == 1


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
    for error in run_ranks(of_rank, num_processes=3, args=(draw_by_rank,)):
        assert error.startswith("BatchSampler with OfRank gave each rank other samples")


def weigh(batch: Any) -> Tensor:
    return batch[1].sum()


def train_weighed(backend: str) -> dict[str, Any]:
    random.seed(1)
    with Trainer(options_of(backend, epochs=1)) as trainer:
        model = OfNumber()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        loader = DataLoader(Numbers(), batch_sampler=[[2, 5, 8, 11, 13], [20, 1, 5]])

        def loss(outputs: Tensor, targets: Tensor) -> Tensor:
            return (cross_entropy(outputs, targets, reduction="none") * targets).sum() / targets.sum()

        trainer.fit(model, optimizer, loss, loader, weight=weigh)
    return model.state_dict()


@pytest.mark.parametrize("backend", ENGINES)
def test_a_share_that_does_not_count_weighs_nothing(backend: str) -> None:
    """With a user's weight, too: it would count the sample as often as there are ranks without one."""
    (alone,) = run_ranks(
        of_rank,
        num_processes=1,
        args=(
            train_weighed,
            backend,
        ),
    )
    for ends in run_ranks(
        of_rank,
        num_processes=4,
        args=(
            train_weighed,
            backend,
        ),
    ):
        torch.testing.assert_close(ends, alone, rtol=1e-5, atol=1e-5)


def resume_with_another(folder: str) -> list[str]:
    """Resume a run whose loader has no generator with one that has, and by a new epoch."""
    log = {"log_dir": folder, "save_every_steps": 1}
    train("ddp", "list", stop_after=2, **log)
    with pytest.raises(CheckpointError) as raised:
        train("ddp", "weighted", resume="auto", **log)
    again = train("ddp", "weighted", resume="auto", resume_partial=("data",), **log)
    return [str(raised.value), digest(again["end"])]


def test_another_sampler_begins_the_epoch_again(tmp_path: Path) -> None:
    for error, _ in run_ranks(of_rank, num_processes=2, args=(resume_with_another, str(tmp_path))):
        assert "it has no sampler (to reset it: --resume-partial data)" in error
