"""Trainings whose bits `test_bits.py` compares: on any engine and ranks, undisturbed and stopped in the middle."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from loaders import LOADERS, Numbers
from loaders import NUM as LOADED
from torch import Tensor, nn
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LinearLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from torch.utils.data import DataLoader, Dataset, IterableDataset
from trainings import digest, signs, train

from hvd_trainer import Callback, RunView, TensorData, accuracy
from hvd_trainer.data import DataShard
from hvd_trainer.jobs.models import conv_net

NUM, GLOBAL_BATCH, EPOCHS = 108, 24, 3  # 5 steps per epoch, the last one short
ODD = 107  # and one sample is trained on twice, or in a stream some are left out
MOMENTUM = partial(torch.optim.SGD, lr=0.5, momentum=0.9)
NO_SAVES = {"save_every_epochs": None, "save_every_s": None}
FIGURES = ("train_loss", "train_accuracy", "train_right", "val_loss", "val_accuracy", "step", "samples", "lr")


class Numbered(nn.Module):
    """A small net, unless plain with dropout and batch norm, that notes the numbers of samples it trained on."""

    def __init__(self, plain: bool = False) -> None:
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

    def __init__(self) -> None:
        self.inputs, self.targets = tensors(ODD)

    def __len__(self) -> int:
        return ODD

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return noisy(self.inputs[index : index + 1])[0], self.targets[index]


class Flow(IterableDataset[tuple[Tensor, Tensor]]):
    """The same data as a stream, which draws a random number for every sample that it yields."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for inputs, target in zip(*tensors(ODD), strict=True):
            yield noisy(inputs.view(1, -1))[0], target


class Batches:
    """The same data as a `BatchSource`, with noise that is drawn for each batch."""

    def batches(self, shard: DataShard, epoch: int | None) -> Iterator[tuple[Tensor, Tensor]]:
        inputs, targets = (tensor[shard.number :: shard.size] for tensor in tensors(ODD))
        batch_size = GLOBAL_BATCH // shard.size
        yield from zip(map(noisy, inputs.split(batch_size)), targets.split(batch_size), strict=True)


class SizedBatches(Batches):
    """`Batches` with `__len__`, the number of samples in an epoch."""

    def __len__(self) -> int:
        return ODD


def noted(data: Any = None, num: int = ODD, **how: Any) -> dict[str, Any]:
    """Return a job that notes its samples."""
    whole = TensorData(*tensors(num))
    usual: dict[str, Any] = {
        "make": Numbered,
        "train_data": whole if data is None else data,
        "val_data": whole,
        "optimizer": partial(torch.optim.AdamW, lr=0.01),
        "metrics": {"accuracy": accuracy},
        "epochs": EPOCHS,
        "global_batch_size": GLOBAL_BATCH,
        "log_every": 2,
        **NO_SAVES,
    }
    return usual | how


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


def crossed(find_unused_parameters: bool = False, **how: Any) -> dict[str, Any]:
    """Return a job of two epochs of three steps in several buckets."""
    make = partial(Crossed, find_unused_parameters)
    how = {"epochs": 2, "global_batch_size": 48, "bucket_mb": 0.0005, "save_every_epochs": 1, **how}
    return noted(num=NUM, make=make, find_unused_parameters=find_unused_parameters, **how)


def halve(optimizer: Any) -> Any:
    return StepLR(optimizer, 1, 0.5)


def cycle(optimizer: Any) -> Any:
    return OneCycleLR(optimizer, 0.5, total_steps=6)


def warm_cosine(optimizer: Any) -> Any:
    return SequentialLR(optimizer, [LinearLR(optimizer, total_iters=2), CosineAnnealingLR(optimizer, 4)], [2])


def plateau(optimizer: Any) -> Any:
    return ReduceLROnPlateau(optimizer, mode="max", patience=0, factor=0.5, threshold=1.0)


def scheduled(scheduler: Any, **how: Any) -> dict[str, Any]:
    """Return a job of six steps with two passes each, in three epochs."""
    how = {"optimizer": MOMENTUM, "metrics": {"accuracy": accuracy}, "scheduler": scheduler, **how}
    how = {"train_data": signs(48), "val_data": signs(16), "accumulate": 2, "global_batch_size": 24, **how}
    return {"make": linear, "epochs": 3, **how}


def linear() -> nn.Module:
    return nn.Linear(6, 2)


class Scaled(Dataset[tuple[Tensor, Tensor]]):
    """A data set with an attribute that a callback changes."""

    def __init__(self) -> None:
        self.data, self.scale = signs(24), 1.0

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.data.inputs[index] * self.scale, self.data.targets[index]


class Course(Callback):
    """A callback that changes the rate and the data after each epoch, and keeps a mean of the weights."""

    def __init__(self, data: Scaled) -> None:
        self.data = data
        self.mean = torch.zeros(2)

    def on_step_end(self, run: RunView, result: Any) -> None:
        self.mean.lerp_(run.model.bias.detach(), 0.5)

    def on_epoch_end(self, run: RunView, record: dict[str, Any]) -> None:
        self.data.scale *= 2
        run.optimizer.param_groups[0]["lr"] *= 0.5

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.data.scale, "mean": self.mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.data.scale = state["scale"]
        self.mean.copy_(state["mean"])


def followed(**how: Any) -> dict[str, Any]:
    """Return a job that a callback follows."""
    data = Scaled()
    usual = {"make": linear, "train_data": data, "callbacks": [Course(data)], "optimizer": MOMENTUM}
    return {**usual, "epochs": 3, "global_batch_size": 12, "workers": 0, **how}


class OfNumber(nn.Module):
    """A model of the sample's number alone: its random one depends on the seed."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layers(inputs[:, :1] / LOADED)
        return outputs


def are_right(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(1) == targets).float()


def loaded(kind: str, **how: Any) -> dict[str, Any]:
    """Return a job on a `DataLoader`."""
    data = {"train_data": LOADERS[kind](), "val_data": DataLoader(Numbers(), batch_size=5)}
    return {"make": OfNumber, **data, "optimizer": MOMENTUM, "metrics": {"right": are_right}, "epochs": 2, **how}


POINTS = 452  # in two epochs of 9 windows of 48 and one of 20: 20 steps


def small_net(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return a net without dropout, which would differ between numbers of ranks."""
    layers = (nn.Flatten(), nn.Linear(16, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 4))
    return nn.Sequential(*layers).to(dtype)


def sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01)


def adamw(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, lr=0.003, weight_decay=0.1)


def points(
    make: Any, optimizer: Any, *shape: int, dtype: torch.dtype = torch.float32, **how: Any
) -> dict[str, Any]:
    """Return a job of 20 steps on points in four clusters."""
    generator = torch.Generator().manual_seed(1)
    targets = torch.randint(0, 4, (POINTS,), generator=generator)
    inputs = torch.randn(POINTS, *shape, generator=generator) + targets.view(-1, *[1] * len(shape))
    data = TensorData(inputs.to(dtype), targets)
    return {"make": make, "train_data": data, "optimizer": optimizer, "epochs": 2, "global_batch_size": 48, **how}


class LastOrder(Callback):
    """A callback that sees that channels are last."""

    def on_step_end(self, run: RunView, result: Any) -> None:
        assert run.model[0].weight.stride() == (18, 1, 6, 2)


def images() -> nn.Sequential:
    norm = nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout()
    return nn.Sequential(nn.Conv2d(2, 4, 3), *norm, nn.Flatten(), nn.Linear(64, 4))


def in_channels(callbacks: Any = (), **how: Any) -> dict[str, Any]:
    """Return a job of convolutions."""
    fused = partial(torch.optim.AdamW, lr=0.03125, weight_decay=0.5, fused=True)
    return points(images, fused, 2, 6, 6, max_norm=1.0, callbacks=callbacks, **how)


class Job(NamedTuple):
    """A function that makes the arguments of a training, and the parts in which it is trained once more."""

    make: Callable[[], dict[str, Any]]
    cuts: Sequence[dict[str, Any]]
    """options of a first part, each of which a second one resumes"""


def job(make: Any, *args: Any, cuts: Sequence[dict[str, Any]] = (), **how: Any) -> Job:
    return Job(partial(make, *args, **how), cuts)


def in_parts(*steps: int) -> list[dict[str, Any]]:
    """Return parts that are stopped in these steps, of which the ones before are saved."""
    return [{"save_every_steps": 1, "stop_after": step} for step in steps]


def ended(*steps: int) -> list[dict[str, Any]]:
    return [{"max_steps": step} for step in steps]


def noted_job(data: Callable[[], Any] | None = None, **how: Any) -> Job:
    """Return one that is stopped a step after a save inside the second epoch, which has then done 2 steps of 5."""
    cut = {"save_every_steps": 7, "stop_after": 8}
    return Job(lambda: noted(None if data is None else data(), **how), [cut])


NOTED = {
    "memory": noted_job(),
    "random transform": noted_job(lambda: TensorData(*tensors(ODD), noisy)),
    "workers": noted_job(Items, workers=2),
    "no workers": noted_job(Items, workers=0),
    "stream": noted_job(Flow, workers=0),
    "stream through workers": noted_job(Flow, workers=2),
    "stream of batches": noted_job(Batches),
    "stream of batches with a length": noted_job(SizedBatches),
    "scheduler, clipping, accumulation": noted_job(scheduler=halve, accumulate=2, max_norm=0.5),
    "fp16": noted_job(precision="fp16"),
    "weights": noted_job(weight=lambda batch: batch[1].sum() / 3, accumulate=2),
}
"""Jobs with dropout, batch norm and an interrupted epoch's figures, which note the samples that they train on."""
OF_ONE_PROCESS = {
    "sgd, clipping, accumulation": job(points, small_net, sgd, 16, accumulate=2, max_norm=0.5),
    "adamw": job(points, small_net, adamw, 16),
}
"""Jobs that one process trains to the same weights, but for the order of sums."""
JOBS: dict[str, Job] = {
    **NOTED,
    # The first exchange of a process had another layout, in which a ring adds in another order of ranks.
    "buckets": job(crossed, cuts=ended(1, 2, 3, 4, 5)),
    "buckets, accumulation": job(crossed, accumulate=2, cuts=ended(1, 4)),
    "sharded optimizer": job(crossed, shard="optimizer", cuts=ended(2, 5)),
    "unused parameters": job(crossed, find_unused_parameters=True, cuts=ended(1, 4)),
    # The second epoch has done a step.
    "cycle": job(scheduled, cycle, scheduler_step="step", cuts=in_parts(4)),
    "warm cosine": job(scheduled, warm_cosine, scheduler_step="step", cuts=in_parts(4)),
    "plateau": job(scheduled, plateau, scheduler_metric="val_accuracy", cuts=in_parts(4)),
    # Saved before callbacks ran, a resumed run had the rate of the epoch before, and no state of theirs.
    "callback": job(followed, cuts=[{"stop_after": 3}]),
    # Loader processes that stayed had a copy of the data set as it was in the first epoch.
    "callback and workers": job(followed, workers=2),
    "weighted loader": job(loaded, "weighted", cuts=in_parts(3, 5)),
    "loader of buckets": job(loaded, "buckets", cuts=in_parts(4, 6)),
    "loader with workers": job(loaded, "workers", cuts=in_parts(3)),
    **OF_ONE_PROCESS,
    "conv net": job(points, conv_net, adamw, 1, 28, 28, accumulate=2, max_norm=1.0),
    "bfloat16": job(points, partial(small_net, torch.bfloat16), sgd, 16, dtype=torch.bfloat16),
    "bfloat16 on the wire": job(points, small_net, sgd, 16, compression="bf16"),
    "channels first": job(in_channels),
    "channels last": job(in_channels, [LastOrder()], channels_last=True),
}


def run(backend: str, folder: str, make: Callable[[], dict[str, Any]], **part: Any) -> dict[str, Any]:
    """Train to the end or to an interruption; return what this rank then has."""
    how, schedulers = make() | part, []
    if "scheduler" in how:
        scheduler = how["scheduler"]
        how["scheduler"] = lambda optimizer: schedulers.append(scheduler(optimizer)) or schedulers[0]
    trained = train(backend, log_dir=folder, **how)
    others = [its.state_dict() for its in (*how.get("callbacks", ()), *schedulers)]
    return {
        "state": {name: tensor.clone() for name, tensor in trained.model.state_dict().items()},
        "weights": trained.weights,
        "records": [[record[name] for name in FIGURES if name in record] for record in trained.history],
        "others": fingerprint(others),
        "optimizer": fingerprint(trained.optimizer.state_dict()),
        "seen": getattr(trained.model, "seen", []),
    }


def fingerprint(state: Any) -> str:
    """Return a fingerprint of nested dictionaries, lists, tensors and numbers."""
    if isinstance(state, dict):
        text = "".join(f"{key}:{fingerprint(value)}" for key, value in state.items())
    elif isinstance(state, list | tuple):
        text = "".join(map(fingerprint, state))
    else:
        text = f"{state.dtype}{digest({'': state})}" if isinstance(state, Tensor) else repr(state)
    return hashlib.sha256(text.encode()).hexdigest()


def outcomes(backend: str, folder: str, names: Iterable[str], cuts: bool) -> dict[str, list[dict[str, Any]]]:
    """Train jobs undisturbed and, with `cuts`, in parts; return what came of each."""
    found = {}
    for name in names:
        make, parts = JOBS[name]
        place = f"{folder}/{name}"
        try:
            found[name] = [run(backend, f"{place}/whole", make)]
            for number, first in enumerate(parts if cuts else ()):
                run(backend, f"{place}/{number}", make, **first)
                found[name].append(run(backend, f"{place}/{number}", make, resume="auto"))
        except Exception as error:
            raise RuntimeError(f"in the job {name!r}") from error
    return found
