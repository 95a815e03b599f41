"""Trainings that `test_resume.py` runs in every rank, undisturbed or stopped in the middle."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from peak_memory import PeakMemory
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset
from trainings import StopAfter, StoppedError, digest, options_of

from hvd_trainer import TensorData, Trainer, accuracy
from hvd_trainer.checkpoint.manager import CheckpointManager
from hvd_trainer.data import DataShard
from hvd_trainer.utils.tensors import local_rows, tensors_in

NUM, GLOBAL_BATCH, EPOCHS = 108, 24, 3  # 5 steps per epoch, the last one short
ODD = 107  # and one sample is trained on twice, or in a stream some are left out


class Numbered(nn.Module):
    """A small net with dropout and batch norm that records the samples it trained on, by their first input."""

    def __init__(self, plain: bool) -> None:
        super().__init__()
        layers = [nn.Linear(6, 16), nn.Tanh()]
        layers += [] if plain else [nn.BatchNorm1d(16), nn.Dropout(0.3)]
        self.net = nn.Sequential(*layers, nn.Linear(16, 3))
        self.seen: list[int] = []

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.seen += inputs[:, 0].round().long().tolist()
        return self.net(inputs[:, 1:])


def tensors(num: int) -> tuple[Tensor, Tensor]:
    """Return inputs whose first element is the sample's number, and targets."""
    generator = torch.Generator().manual_seed(1)
    targets = torch.randint(0, 3, (num,), generator=generator)
    inputs = torch.randn(num, 6, generator=generator) + targets.view(-1, 1)
    return torch.cat([torch.arange(num).view(-1, 1), inputs], 1), targets


def noisy(inputs: Tensor) -> Tensor:
    """Transform a whole batch at random; the sample's number stays."""
    noise = 0.1 * torch.randn_like(inputs)
    noise[:, 0] = 0
    return inputs + noise


class Items(Dataset[tuple[Tensor, Tensor]]):
    """The same data one by one, with a random transform, for loader processes."""

    def __init__(self, num: int) -> None:
        self.inputs, self.targets = tensors(num)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return noisy(self.inputs[index : index + 1])[0], self.targets[index]


class Flow(IterableDataset[tuple[Tensor, Tensor]]):
    """The same data as a stream, which draws a random number for every sample that it yields."""

    def __init__(self, num: int) -> None:
        self.num = num

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for inputs, target in zip(*tensors(self.num), strict=True):
            yield noisy(inputs.view(1, -1))[0], target


class Batches:
    """The same data as a `BatchSource`, with noise that is drawn for each batch."""

    def __init__(self, num: int) -> None:
        self.num = num

    def batches(self, shard: DataShard, epoch: int | None) -> Iterator[tuple[Tensor, Tensor]]:
        inputs, targets = (tensor[shard.number :: shard.size] for tensor in tensors(self.num))
        batch_size = GLOBAL_BATCH // shard.size
        yield from zip(map(noisy, inputs.split(batch_size)), targets.split(batch_size), strict=True)


class SizedBatches(Batches):
    """`Batches` with `__len__`, the number of samples in an epoch."""

    def __len__(self) -> int:
        return self.num


def halve(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


SETUPS: dict[str, dict[str, Any]] = {
    "memory": {},
    "random transform": {"data": lambda num: TensorData(*tensors(num), noisy)},
    "workers": {"data": Items, "train": {"workers": 2}},
    "no workers": {"data": Items, "train": {"workers": 0}},
    "stream": {"data": Flow, "train": {"workers": 0}},
    "stream through workers": {"data": Flow, "train": {"workers": 2}},
    "stream of batches": {"data": Batches},
    "stream of batches with a length": {"data": SizedBatches},
    "scheduler, clipping, accumulation": {"scheduler": halve, "train": {"accumulate": 2, "max_norm": 0.5}},
    "fp16": {"train": {"precision": "fp16"}},
    "weights": {"weight": lambda batch: batch[1].sum() / 3, "train": {"accumulate": 2}},
}


def run(
    backend: str,
    folder: str,
    setup: dict[str, Any],
    *,
    plain: bool = False,
    stop_after: int | None = None,
    global_batch: int = GLOBAL_BATCH,
    num: int = ODD,
    **save: Any,
) -> dict[str, Any]:
    """Train to the end or to an interruption; return what this rank then has."""
    train = {"epochs": EPOCHS, "global_batch_size": global_batch, **setup.get("train", {})}
    save = {"save_every_epochs": None, "save_every_s": None, **save}
    options = options_of(backend, log_dir=folder, log_every=2, **train, **save)
    make: Callable[[int], Any] = setup.get("data", lambda num: TensorData(*tensors(num)))
    with Trainer(options) as trainer:
        model = Numbered(plain)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        history = None
        with suppress(StoppedError):
            history = trainer.fit(
                model,
                optimizer,
                nn.functional.cross_entropy,
                make(num),
                TensorData(*tensors(num)),
                scheduler=setup.get("scheduler"),
                weight=setup.get("weight"),
                metrics={"accuracy": accuracy},
                callbacks=[StopAfter(stop_after)],
            )
        rank = trainer.world.rank
        figures = ("train_loss", "train_accuracy", "val_loss", "val_accuracy", "step", "samples", "lr")
        return {
            "rank": rank,
            "weights": {name: tensor.clone() for name, tensor in model.state_dict().items()},
            "optimizer": fingerprint(optimizer.state_dict()),
            "seen": model.seen,
            "records": [[record[name] for name in figures] for record in (history.epochs if history else [])],
        }


def fingerprint(state: Any) -> str:
    """Return a fingerprint of nested dictionaries, lists, tensors and numbers."""
    if isinstance(state, dict):
        text = "".join(f"{key}:{fingerprint(value)}" for key, value in state.items())
    elif isinstance(state, list | tuple):
        text = "".join(map(fingerprint, state))
    else:
        text = repr((state.dtype, state.numpy().tobytes()) if isinstance(state, Tensor) else state)
    return hashlib.sha256(text.encode()).hexdigest()


def interrupted_and_not(backend: str, folder: str) -> tuple[int, dict[str, tuple[Any, Any]]]:
    """Train each set-up undisturbed, and stopped a step after a save inside the second epoch and resumed."""
    found, rank = {}, 0
    for number, (name, setup) in enumerate(SETUPS.items()):
        place = Path(folder) / f"{backend}-{number}"
        whole = run(backend, str(place / "whole"), setup)
        run(backend, str(place / "parts"), setup, save_every_steps=7, stop_after=8)
        resumed = run(backend, str(place / "parts"), setup, resume="auto")
        found[name] = whole, resumed
        rank = whole["rank"]
    return rank, found


class Crossed(nn.Module):
    """Layers that stand in another order than they run in; which of two branches runs depends on the batch."""

    def __init__(self, branches: bool) -> None:
        super().__init__()
        self.last = nn.Linear(11, 3)
        self.left, self.right = nn.Linear(13, 11), nn.Linear(13, 11)
        self.middle = nn.Linear(17, 13)
        self.first = nn.Linear(6, 17)
        self.branches = branches

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.middle(self.first(inputs[:, 1:]).tanh()).tanh()
        if not self.branches:
            return self.last((self.left(hidden) * self.right(hidden)).tanh())
        branch = self.left if int(inputs[0, 0]) % 2 else self.right
        return self.last(branch(hidden).tanh())


WAYS: dict[str, dict[str, Any]] = {
    "usual": {},
    "accumulation": {"accumulate": 2},
    "sharded optimizer": {"shard": "optimizer"},
    "unused parameters": {"find_unused_parameters": True},
}
STEPS = 6


def resumed_after_each_step(backend: str, folder: str) -> tuple[int, dict[str, list[str]]]:
    """Train two epochs of three steps in several buckets, and resume after each of the steps.

    Returns:
        By the way to train, digests of the weights of the undisturbed run, and of those that resume after a step.
    """
    results: dict[str, list[str]] = {}
    rank = 0

    def train(way: dict[str, Any], folder: Path, **part: Any) -> str:
        nonlocal rank
        chosen = {"epochs": 2, "global_batch_size": 48, "bucket_mb": 0.0005, **way, **part}
        with Trainer(options_of(backend, log_dir=str(folder), **chosen)) as trainer:
            rank = trainer.world.rank
            model = Crossed(branches=bool(way.get("find_unused_parameters")))
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            trainer.fit(model, optimizer, nn.functional.cross_entropy, TensorData(*tensors(NUM)))
            return digest(model.state_dict())

    for name, way in WAYS.items():
        place = Path(folder) / name
        results[name] = [train(way, place / "whole")]
        for step in range(1, STEPS):
            train(way, place / f"{step}", max_steps=step)
            results[name].append(train(way, place / f"{step}", resume="auto"))
    return rank, results


WIDTH = 2830
"""Rows and columns of a weight of 32 MB."""


class Wide(nn.Module):
    """A model of 160 MB in 5 blocks, beside a frozen tensor of so many numbers."""

    def __init__(self, frozen: int, value: float) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(5)))
        self.frozen = nn.Parameter(torch.full((frozen,), value), requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(inputs.repeat(1, WIDTH))[:, :2]


def memory_of_resumes(
    backend: str, folder: str, shards: list[str], frozen: int = 2
) -> tuple[int, dict[str, tuple[int, int]]]:
    """Train a step and resume after it, with each `--shard`; return its state and its peak in a rank, in bytes.

    The peak is that of the model before, and of what restoring takes; buffers of gradients are not part of it.
    """
    data = TensorData(torch.ones(2, 1), torch.zeros(2).long())
    measured, rank, restore = {}, 0, CheckpointManager.restore

    def measure(manager: CheckpointManager, **how: Any) -> bool:
        own = manager.state.model, manager.state.others["optimizer"].state
        before = own_bytes(*own)
        with PeakMemory() as peak:
            is_restored = restore(manager, **how)
        if is_restored:
            assert local_rows(own[0].frozen)[0].eq(1).all(), "as it was saved"
            measured[shard] = own_bytes(*own), before + peak.grown_bytes
        return is_restored

    for shard in shards:
        for value, resume in ((1.0, "none"), (0.0, "auto")):
            chosen = {"shard": shard, "log_dir": str(Path(folder) / shard), "resume": resume}
            options = options_of(backend, epochs=1, batch_size=1, save_every_s=None, **chosen)
            with Trainer(options) as trainer, pytest.MonkeyPatch.context() as patch:
                rank = trainer.world.rank
                patch.setattr(CheckpointManager, "restore", measure)
                patch.setattr("hvd_trainer.training.trainer._finished", set())  # as in a process of its own
                model = Wide(frozen, value)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
                trainer.fit(model, optimizer, nn.functional.cross_entropy, data)
            del model, optimizer
            gc.collect()
    return rank, measured


def own_bytes(model: nn.Module, state: Any) -> int:
    """Return the bytes of a model and its optimizer's state in this rank."""
    return sum(local_rows(tensor)[0].nbytes for tensor in tensors_in([model.state_dict(), dict(state)]))


def first_part(backend: str, folder: str) -> tuple[int, dict[str, Any]]:
    """Save in the middle of the second epoch, then train two steps more, which are lost."""
    result = run(backend, folder, {}, plain=True, num=NUM, global_batch=48, save_every_steps=4, stop_after=5)
    return result["rank"], result


def second_part(backend: str, folder: str, resume: str) -> tuple[int, dict[str, Any]]:
    result = run(backend, folder, {}, plain=True, num=NUM, global_batch=48, resume=resume)
    return result["rank"], result
