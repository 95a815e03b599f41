"""Report from every rank which samples it received; `test_data.py` compares the ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing import current_process
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, default_collate, get_worker_info

from hvd_trainer import backends
from hvd_trainer.backends import Backend, EngineOptions
from hvd_trainer.data import (
    DataShard,
    Loader,
    LoaderPlan,
    TensorData,
    make_loader,
    mean_samples,
    once_per_node,
    samples_in,
    samples_taken,
)
from hvd_trainer.errors import DataError

NUM, FEW, BATCH = 23, 2, 4
STREAMS = ((4, 0), (5, 0), (16, 0), (23, 0), (24, 0), (23, 2))
"""(samples, workers): each worker is a process to start, so that one case must do."""


def numbers(count: int) -> TensorData:
    """Return data whose sample i is (i, i), so that a batch shows which samples it holds."""
    return TensorData(torch.arange(count).float().unsqueeze(1), torch.arange(count))


class Seeds(Dataset[Any]):
    """Data whose targets are the random seeds that they were loaded with."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.zeros(1), torch.initial_seed()


class Stream(IterableDataset[Any]):
    """A stream of 0, 1, 2, ... plus 100 per epoch, as (x, {"id": x}) pairs: nested batches are sliced, too."""

    def __init__(self, count: int) -> None:
        self.count, self.epoch = count, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple[Tensor, dict[str, int]]]:
        for number in range(self.count):
            yield torch.tensor([number]), {"id": number + 100 * self.epoch}


WAYS = ("none", "worker", "rank", "both")


class Parts(IterableDataset[Any]):
    """A stream that gives each worker, each rank, or each worker of each rank a part of its own.

    Args:
        head: samples that all parts begin with.
    """

    def __init__(self, way: str, rank: int, size: int, head: int = 0) -> None:
        self.way, self.rank, self.size, self.count, self.head = way, rank, size, 24 * size, head

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        info = get_worker_info()
        number, workers = (info.id, info.num_workers) if info and self.way in ("worker", "both") else (0, 1)
        rank, size = (self.rank, self.size) if self.way in ("rank", "both") else (0, 1)
        yield from [(torch.zeros(1), 0)] * self.head
        for i in range(rank * workers + number, self.count, size * workers):
            yield torch.zeros(1), i


def drop(samples: list[Any]) -> Any:
    """Drop every fifth sample."""
    return default_collate([sample for sample in samples if int(sample[0]) % 5])


def sharding(backend: Backend, way: str, workers: int) -> tuple[list[int], list[int], int]:
    """Return the samples of a training and of an evaluation, and the samples that no rank has counted."""
    data = Parts(way, backend.world.rank, backend.world.size)
    if way in ("rank", "both"):
        data.shards_by_rank = True
    mine = loader(backend, data, workers)
    batches = list(mine.epoch(0))
    left = data.count - sum(samples_taken(batch, backend.world.size) for batch in batches)
    return sum(taken(iter(batches)), []), sum(taken(mine.evaluation()), []), left


class PartsOfProcesses(IterableDataset[Any]):
    """A stream that begins alike everywhere, and then gives each process samples of its own."""

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        yield torch.zeros(1), 0
        for _ in range(9 * BATCH):
            yield torch.zeros(1), int(current_process().name.rpartition("-")[2])


def errors_of(loader: Loader) -> list[str]:
    """Return the errors of a training and of an evaluation."""
    found = []
    for batches, check in ((loader.epoch(0), lambda: None), (loader.evaluation(), loader.check_evaluation)):
        try:
            taken(batches)
            check()
        except DataError as error:
            found.append(str(error))
    return found


def undeclared(backend: Backend, way: str, head: int) -> list[str]:
    return errors_of(loader(backend, Parts(way, backend.world.rank, backend.world.size, head)))


def dropped(backend: Backend, data: Any) -> list[tuple[int, float, int]]:
    """Return of each batch its samples, their mean over ranks, and those taken by all ranks."""
    plan = LoaderPlan(BATCH, seed=5, num_workers=0)
    batches = make_loader(data, backend, plan, collate=drop).epoch(0)
    return [(samples_in(b), mean_samples(b), samples_taken(b, backend.world.size)) for b in batches]


class Batches:
    """The samples of `Stream` from a loader that makes batches by itself."""

    def __init__(self, count: int, batch_size: int = BATCH) -> None:
        self.count, self.batch_size = count, batch_size

    def batches(self, shard: DataShard, epoch: int | None) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        ids = torch.arange(shard.number, self.count, shard.size)
        for part in ids.split(self.batch_size) if len(ids) else ():
            yield part.unsqueeze(1), {"id": part + 100 * (epoch or 0)}


class SizedBatches(Batches):
    """`Batches` with `__len__`, the number of samples in an epoch."""

    def __len__(self) -> int:
        return self.count


def taken(batches: Iterator[Any], target: Callable[[Any], Tensor] = lambda targets: targets) -> list[list[int]]:
    found = []
    for inputs, targets in batches:
        assert len(inputs) == len(target(targets)) > 0, "an empty batch would make the loss NaN"
        found.append(target(targets).tolist())
    return found


def report(backend_name: str, folder: str) -> dict[str, Any]:
    """Return all that is recorded about data on one engine in one launch."""
    with backends.create(EngineOptions(backend=backend_name)) as backend:  # type: ignore[arg-type]
        later = BATCH * backend.world.size
        return {
            "training": {kind: training(backend, kind) for kind in ("memory", "loader", "workers")},
            "evaluation": {count: evaluation(backend, count) for count in (FEW, NUM)},
            "streams": {case: streams(backend, Stream(case[0]), workers=case[1]) for case in STREAMS},
            "sources": {case: streams(backend, Batches(case[0]), later) for case in STREAMS},
            "sized sources": {case: streams(backend, SizedBatches(case[0]), later) for case in STREAMS},
            "sharding": {(way, workers): sharding(backend, way, workers) for way in WAYS for workers in (0, 2, 4)},
            "undeclared": {
                (way, head): undeclared(backend, way, head) for way in ("rank", "both") for head in (0, 1, 9)
            },
            "by process": errors_of(loader(backend, PartsOfProcesses(), 2)),
            "dropped": {
                "list": dropped(backend, [(torch.tensor([float(i)]), i) for i in range(24)]),
                "stream": dropped(backend, Stream(24)),
            },
            "too short": too_short(backend),
            "seeds": taken(loader(backend, Seeds(), 1).evaluation()),
            "once": once(backend, Path(folder)),
        }


def loader(backend: Backend, data: Any, num_workers: int = 0) -> Loader:
    return make_loader(data, backend, LoaderPlan(BATCH, seed=5, num_workers=num_workers))


def training(backend: Backend, kind: str) -> list[list[list[int]]]:
    """Load two epochs, and the rest of one of which 9 samples have been consumed; no random state is used."""
    whole = numbers(NUM)
    data: Any = whole if kind == "memory" else [whole[i] for i in range(NUM)]
    before = torch.random.get_rng_state()
    mine = loader(backend, data, 2 if kind == "workers" else 0)
    found = [taken(mine.epoch(*where)) for where in ((0,), (1,), (1, 9))]
    assert torch.equal(before, torch.random.get_rng_state()), f"{kind}: dropout would depend on how data is loaded"
    return found


def evaluation(backend: Backend, count: int) -> list[list[int]]:
    whole = numbers(count)
    stream, source = (
        taken(loader(backend, data).evaluation(), lambda targets: targets["id"])
        for data in (Stream(count), Batches(count))
    )
    listed = taken(loader(backend, [whole[i] for i in range(count)]).evaluation())
    memory = taken(loader(backend, whole).evaluation())
    assert memory == listed
    return [sum(memory, []), sum(stream, []), sum(source, [])]


def streams(backend: Backend, data: Any, consumed: int = 2, workers: int = 0) -> list[list[list[int]]]:
    mine = loader(backend, data, workers)
    return [taken(mine.epoch(*where), lambda targets: targets["id"]) for where in ((0,), (1,), (1, consumed))]


def too_short(backend: Backend) -> str:
    try:
        taken(loader(backend, Stream(0)).epoch(0))
    except DataError as error:
        return str(error)
    return "no error"


def once(backend: Backend, folder: Path) -> dict[str, Any]:
    """Return who prepared, what each rank gets of another's exception, and who gave up waiting for a slow rank."""
    rank = backend.world.rank
    done = once_per_node(backend, lambda: (folder / f"by-{rank}").touch())

    def fails() -> None:
        raise ValueError(f"rank {rank}: no space")

    failed = once_per_node(backend, fails)
    late = ""
    with suppress(DataError):
        once_per_node(backend, lambda: time.sleep(2), timeout_s=0.2 if not backend.world.is_first_on_node else 30)
        late = "waited"
    return {"done": done, "failed": failed, "late": late, "first": backend.world.is_first_on_node}
