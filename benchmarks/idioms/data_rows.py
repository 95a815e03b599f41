"""Rows about data sets, streams, collate functions and samplers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import (
    BatchSampler,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)

from benchmarks.idioms.idiom import CountingIdiom, Idiom


class SomeAreBad(TensorDataset):
    """5 of 12 samples cannot be read."""

    def __getitem__(self, number: int) -> Any:
        return None if number in (0, 2, 4, 7, 10) else super().__getitem__(number)


def drop_bad(samples: list[Any]) -> Any:
    """Return a batch of those that could be read."""
    return default_collate([sample for sample in samples if sample is not None])


class DropBadSamples(Idiom):
    """Seven samples are left, which no number of ranks shares evenly."""

    number, title = "5a", "a `collate` that drops bad samples"

    def make_data(self) -> Dataset[Any]:
        return SomeAreBad(*super().make_data().tensors)

    def prepare(self) -> None:
        self.collate = drop_bad
        self.item_count = lambda batch: len(batch[1])


def time_first(samples: list[Any]) -> Any:
    """Return (3, N, 1) inputs and (3, N, 1) targets."""
    inputs = torch.stack([torch.stack([x[:1], x[1:], x[:1] - x[1:]]) for x, _ in samples], 1)
    return inputs, inputs.sin()


class TimeFirst(Idiom):
    """The second dimension is that of the samples."""

    number, title = "5b", "a `collate` that gives (T, N)"

    def make_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1))

    def prepare(self) -> None:
        self.collate = time_first


class Sequences(Dataset[Any]):
    """Twelve sequences of 1 to 12 tokens."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, number: int) -> Any:
        tokens = torch.linspace(-1, 1, number + 1).unsqueeze(1)
        return tokens, tokens.sin() * number


def pack(samples: list[Any]) -> Any:
    """Return the tokens of all sequences, one after the other."""
    return torch.cat([x for x, _ in samples]), torch.cat([y for _, y in samples])


class PackTokens(TimeFirst):
    """Ranks have as many sequences, and not as many tokens."""

    number, title = "5c", "a `collate` that packs tokens; the loss is their mean"

    def make_data(self) -> Dataset[Any]:
        return Sequences()

    def prepare(self) -> None:
        self.collate = pack
        self.item_count = lambda batch: len(batch[1])


class Stream(IterableDataset):
    """24 samples, of which each worker, each rank, or each worker of each rank may take its part."""

    def __init__(self, *, by_worker: bool, by_rank: bool) -> None:
        self.by_worker = by_worker
        self.rank, self.size = (0, 1)
        if by_rank:
            self.rank, self.size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info() if self.by_worker else None
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        for sample in range(self.rank * workers + number, 24, self.size * workers):
            yield torch.tensor([float(sample)]), torch.zeros(1)


class PlainStream(CountingIdiom):
    """With and without loader processes."""

    number, title = "6a", "a stream that shares nothing out"
    loader_processes = (0, 2)
    by_worker, by_rank = False, False

    def make_data(self) -> Dataset[Any]:
        return Stream(by_worker=self.by_worker, by_rank=self.by_rank)


class StreamByWorker(PlainStream):
    """As PyTorch's page of `IterableDataset` shows."""

    number, title, by_worker = "6b", "a stream that gives each worker its part", True


class StreamByRank(PlainStream):
    """By the variables RANK and WORLD_SIZE."""

    number, title, by_rank = "6c", "a stream that gives each rank its part, without loader processes", True
    loader_processes = (0,)


class StreamByBoth(StreamByRank):
    """As WebDataset and Hugging Face's data sets do."""

    number, title, by_worker = "6d", "a stream that gives each worker of each rank its part", True
    loader_processes = (0, 2)


class Shifted(TensorDataset):
    """A subclass whose samples are other ones."""

    def __getitem__(self, number: int) -> Any:
        inputs, targets = super().__getitem__(number)
        return inputs - 1000.0, targets


class SubclassOfTensorDataset(CountingIdiom):
    """Its tensors hold 1000 more than its samples."""

    number, title = "7", "a subclass of `TensorDataset` with its own `__getitem__`"

    def make_data(self) -> Dataset[Any]:
        numbers = torch.arange(float(self.num_samples)).unsqueeze(1)
        return Shifted(numbers + 1000.0, numbers)


class Augmented(Dataset[Any]):
    """Each sample gets a random fraction."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, number: int) -> Any:
        return number / 2 + torch.rand(1) / 4, torch.zeros(1)


class RandomAugmentation(CountingIdiom):
    """A `Subset`, as `random_split` gives; what is compared is the fraction of each sample."""

    number, title = "8", "random augmentation of a `Subset`"
    right = "each sample as in one process"
    unit = "samples changed"
    expected = None

    def make_data(self) -> Dataset[Any]:
        return Subset(Augmented(), range(0, 48, 2))

    def values(self) -> list[float]:
        drawn = {int(number): number for number in self.model.given}
        return [drawn.get(sample, 0.0) for sample in range(self.num_samples)]


class Named(Dataset[Any]):
    """Samples with a dict of a tensor and a text, and a list."""

    def __len__(self) -> int:
        return 13

    def __getitem__(self, number: int) -> Any:
        inputs = {"x": torch.tensor([float(number)]), "names": [f"sample {number}", "x"]}
        return inputs, torch.tensor([float(number**2)])


class OfDicts(nn.Module):
    """A model that refuses a batch whose parts are of different lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, inputs: Any) -> Tensor:
        lengths = {len(inputs["x"]), *map(len, inputs["names"])}
        if len(lengths) > 1:
            raise ValueError(f"the parts of a batch have the lengths {sorted(lengths)}")
        return self.layer(inputs["x"])


class EvaluateDicts(Idiom):
    """13 samples, which neither 2 nor 3 ranks share evenly; the metric over them is compared."""

    number, title = "9", "evaluate 13 samples in batches of dicts and lists"
    right = "each sample once"
    epochs = 1

    def make_data(self) -> Dataset[Any]:
        return Subset(Named(), range(12))

    def make_model(self) -> nn.Module:
        return OfDicts()

    def prepare(self) -> None:
        self.val_data = Named()

    def make_optimizer(self) -> Optimizer:
        return SGD(self.model.parameters(), lr=0.0)

    def metric(self, outputs: Any, targets: Tensor) -> Tensor:
        return (outputs - targets).abs().mean(1)

    def values(self) -> list[float]:
        return [self.val_metric]


class Weighted(Idiom):
    """Four batches of six in an epoch, drawn with replacement; weights are compared."""

    number, title = "L1", "a `DataLoader` with a `WeightedRandomSampler`"
    batch = 6
    epochs = 2

    def make_data(self) -> Dataset[Any]:
        inputs = torch.randn(24, 2, generator=torch.Generator().manual_seed(3))
        return TensorDataset(inputs, inputs.sum(1, keepdim=True) ** 2)

    def prepare(self) -> None:
        weights = torch.arange(1.0, 25.0)
        self.sampler = WeightedRandomSampler(weights, 24, generator=torch.Generator().manual_seed(1))


class Buckets(BatchSampler):
    """Six batches of samples of one length; batches are of 3 to 5 samples."""

    def __init__(self) -> None:
        self.drop_last = False

    def __iter__(self) -> Iterator[list[int]]:
        starts = (0, 3, 8, 12, 16, 21, 24)
        yield from (list(range(a, b)) for a, b in zip(starts, starts[1:], strict=False))

    def __len__(self) -> int:
        return 6


class OfOneLength(nn.Module):
    """A model that counts the samples that it is given, all of one length."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.given = nn.Linear(1, 1), []

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.given += inputs[:, 0].tolist()
        return self.layer(inputs.mean(1, keepdim=True))


class OfLengths(Dataset[Any]):
    """24 samples of four lengths, which default collation cannot mix."""

    lengths = (*chain([1] * 8, [2] * 4, [3] * 4, [4] * 8),)

    def __len__(self) -> int:
        return 24

    def __getitem__(self, number: int) -> Any:
        return torch.full((self.lengths[number],), float(number)), torch.zeros(1)


class BatchesOfBuckets(CountingIdiom):
    """A mix of lengths would be an error of `default_collate`."""

    number, title = "L2", "a `DataLoader` with a batch sampler of buckets, of unequal sizes"

    def make_data(self) -> Dataset[Any]:
        return OfLengths()

    def make_model(self) -> nn.Module:
        return OfOneLength()

    def prepare(self) -> None:
        self.batch_sampler = Buckets()


ROWS = (
    *(DropBadSamples, TimeFirst, PackTokens),
    *(PlainStream, StreamByWorker, StreamByRank, StreamByBoth),
    *(SubclassOfTensorDataset, RandomAugmentation, EvaluateDicts, Weighted, BatchesOfBuckets),
)
