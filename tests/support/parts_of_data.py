"""Give each rank a part of map-style data of its own, as by hand under torchrun, or the same in other ways."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset, random_split

from hvd_trainer import EngineOptions, LogOptions, TensorData, Trainer, TrainerOptions, TrainOptions
from hvd_trainer.data import DataShard
from hvd_trainer.errors import DataError

NUM = 24
INPUTS, TARGETS = torch.arange(2.0 * NUM).reshape(NUM, 2), torch.arange(1.0 * NUM).reshape(NUM, 1)
WHOLE = TensorDataset(INPUTS, TARGETS)


class Unread(Dataset[Any]):
    """Data whose samples may be read by nobody but a step: a sample draws random numbers, and counts."""

    def __init__(self, num: int = NUM) -> None:
        self.num, self.reads = num, 0

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.reads += 1
        return torch.rand(2), torch.rand(1)


class Batches:
    """A source of batches, whose lists of files each rank has for itself."""

    def __init__(self, rank: int) -> None:
        self.files = ["a"] * rank

    def batches(self, shard: DataShard, epoch: int | None) -> Iterator[tuple[Tensor, Tensor]]:
        yield INPUTS[:2], TARGETS[:2]


def every(rank: int, size: int) -> slice:
    return slice(rank, NUM // size * size, size)


def listed(data: Any) -> list[Any]:
    return [data[place] for place in range(len(data))]


def shuffled(rank: int) -> list[int]:
    return torch.randperm(NUM, generator=torch.Generator().manual_seed(rank)).tolist()


def noisy(rank: int, *, differs: bool) -> TensorData:
    data = TensorData(INPUTS + rank * 1e-6, TARGETS)
    if not differs:
        data.shards_by_rank = False  # type: ignore[attr-defined]
    return data


def split_after_draws(rank: int) -> Any:
    torch.manual_seed(0)
    torch.rand(rank)
    return random_split(WHOLE, [16, 8])[0]


OTHER, FEWER, KIND = (
    "other samples",
    "samples on rank 1 and",
    "is DataLoader on rank 1 and TensorDataset on rank 0",
)
PARTS: dict[str, tuple[Callable[[int, int], Any], str]] = {
    "tensor data": (lambda r, n: TensorData(INPUTS[every(r, n)], TARGETS[every(r, n)]), OTHER),
    "tensor data set": (lambda r, n: TensorDataset(INPUTS[every(r, n)], TARGETS[every(r, n)]), OTHER),
    "targets": (lambda r, n: TensorData(INPUTS, TARGETS + r), OTHER),
    "unequal": (lambda r, n: TensorData(INPUTS[r:], TARGETS[r:]), FEWER),
    "own class": (lambda r, n: Unread(NUM - r), FEWER),
    "list": (lambda r, n: listed(WHOLE)[every(r, n)], OTHER),
    "arrays": (lambda r, n: [(np.full(2, r, np.float32), np.ones(1, np.float32))] * NUM, OTHER),
    "subset": (lambda r, n: Subset(WHOLE, range(NUM)[every(r, n)]), OTHER),
    "subset of own class": (lambda r, n: Subset(Unread(), torch.arange(NUM)[every(r, n)].tolist()), OTHER),
    "order": (lambda r, n: Subset(WHOLE, shuffled(r)), OTHER),
    "nested": (lambda r, n: Subset(Subset(WHOLE, shuffled(r)), range(8)), OTHER),
    "concatenated": (lambda r, n: ConcatDataset([WHOLE, Subset(WHOLE, shuffled(r))]), OTHER),
    "split": (lambda r, n: split_after_draws(r), OTHER),
    "loader": (lambda r, n: DataLoader(Subset(WHOLE, range(NUM)[every(r, n)]), batch_size=6), OTHER),
    "unequal loader": (lambda r, n: DataLoader(Subset(WHOLE, range(r, NUM)), batch_size=6), FEWER),
    "one loader": (lambda r, n: DataLoader(WHOLE, batch_size=6) if r else WHOLE, KIND),
    "noise": (lambda r, n: noisy(r, differs=True), OTHER),
}
"""By name: what gives a rank its data, by its number and how many there are; and what the error says."""
ALIKE: dict[str, Callable[[int, int], Any]] = {
    "tensor data": lambda r, n: TensorData(INPUTS, TARGETS),
    "conjugated": lambda r, n: TensorDataset(torch.complex(INPUTS, INPUTS).conj().imag, TARGETS),
    "other strides": lambda r, n: TensorData(INPUTS if r else INPUTS.t().contiguous().t(), TARGETS),
    "own class": lambda r, n: Unread(),
    "split": lambda r, n: random_split(Unread(), [16, 8], generator=torch.Generator().manual_seed(0))[0],
    "source": lambda r, n: Batches(r),
    "noise": lambda r, n: noisy(r, differs=False),
}


def refusal(call: Callable[[], Any]) -> str:
    """Return the text of the DataError that a call raises; `nothing` if it raises none."""
    try:
        call()
    except DataError as error:
        return str(error)
    return "nothing"


def report(backend: str) -> dict[str, Any]:
    """Return what is said of each kind of parts, by `fit` of training and validation data and by `evaluate`."""
    options = TrainerOptions(
        engine=EngineOptions(backend=backend, device="cpu"),  # type: ignore[arg-type]
        train=TrainOptions(batch_size=2, epochs=1, max_steps=1, workers=0),
        log=LogOptions(quiet=True),
    )
    with Trainer(options) as trainer:
        rank, size = trainer.world.rank, trainer.world.size
        model, loss = nn.Linear(2, 1), nn.functional.mse_loss
        fit = partial(trainer.fit, model, torch.optim.SGD(model.parameters(), lr=1e-6), loss)
        texts: dict[str, Any] = {}
        for name, (part, _) in PARTS.items():
            data = part(rank, size)
            calls = (partial(fit, data), partial(fit, WHOLE, data), partial(trainer.evaluate, model, loss, data))
            texts[name] = [refusal(call) for call in calls]
            assert getattr(data, "reads", 0) == 0
        texts["no data on rank 0"] = refusal(partial(fit, WHOLE, WHOLE if rank else None))
        texts["alike"] = {name: refusal(partial(fit, whole(rank, size))) for name, whole in ALIKE.items()}
        return texts
