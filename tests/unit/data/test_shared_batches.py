"""Batches of loader processes in memory that is used again: they are PyTorch's, and no batch changes another."""

from __future__ import annotations

import os
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate
from torchvision import tv_tensors

from hvd_trainer.data import shared_batches
from hvd_trainer.data.shared_batches import SharedBatches

Pair = namedtuple("Pair", "left right")
LENGTH, BATCH = 24, 4


class Numbers:
    """Samples that tell their index, made by a function of it."""

    def __init__(self, sample: Callable[[int], Any], length: int = LENGTH) -> None:
        self.sample, self.length = sample, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.sample(index)


def rows(index: int) -> Tensor:
    return torch.arange(6).view(2, 3) + 10 * index


def loader(data: Any, num_workers: int = 1, collate: Any = None, method: str = "fork") -> DataLoader[Any]:
    """Forked by default: a process that is started anew takes seconds, and gets no lambda."""
    shared = SharedBatches(collate)
    return DataLoader(data, BATCH, num_workers=num_workers, collate_fn=shared, multiprocessing_context=method)


def load(sample: Callable[[int], Any], collate: Any = None, length: int = LENGTH) -> Iterator[Any]:
    return iter(loader(Numbers(sample, length), collate=collate))


def summary(value: Any) -> Any:
    """Types, shapes and numbers of all that a batch holds."""
    if isinstance(value, Tensor):
        return type(value), value.dtype, value.stride(), value.to_dense().tolist()
    if isinstance(value, dict):
        return {key: summary(item) for key, item in value.items()}
    return (type(value), [summary(item) for item in value]) if isinstance(value, list | tuple) else value


SAMPLES: dict[str, Callable[[int], Any]] = {
    "tensor and number": lambda index: (rows(index), index),
    "float, text, bytes": lambda index: (index / 2, str(index), b"%d" % index),
    "half precision": lambda index: rows(index).to(torch.bfloat16),
    "booleans": lambda index: rows(index) % 2 == 0,
    "array": lambda index: np.full((2, 2), index, np.float32),
    "nested": lambda index: Pair({"ids": rows(index), "mask": [rows(index)[0]]}, torch.tensor(index)),
    "nothing": lambda index: (torch.empty(0, 3), index),
    "columns": lambda index: rows(index).t(),
    "complex": lambda index: torch.complex(rows(index).float(), rows(index).float()),
    "image": lambda index: tv_tensors.Image(rows(index)[None].byte()),
}
COLLATES: dict[str, Callable[[list[Any]], Any]] = {
    "of tensors": lambda samples: torch.stack(samples),
    "PyTorch's": default_collate,
    "views of one": lambda samples: (torch.stack(samples), torch.stack(samples)[1:], torch.stack(samples).t()),
    "one tensor twice": lambda samples: (lambda x: (x, x, x.view(-1)))(torch.stack(samples)),
    "parts of PyTorch's": lambda samples: (lambda x: (x[:2], x[2:]))(default_collate(samples)),
    "sparse": lambda samples: torch.stack(samples).to_sparse(),
    "padded": lambda samples: torch.nn.functional.pad(torch.stack(samples), (0, int(samples[0].max()) % 7)),
}


@pytest.mark.parametrize("sample", SAMPLES)
def test_batches_are_those_of_a_data_loader(sample: str) -> None:
    expected = DataLoader(Numbers(SAMPLES[sample]), BATCH)  # type: ignore[arg-type]

    assert [summary(batch) for batch in load(SAMPLES[sample])] == [summary(batch) for batch in expected]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("collate", COLLATES)
def test_batches_of_a_collate_function_are_those_of_a_data_loader(collate: str) -> None:
    def sample(index: int) -> Tensor:
        return rows(index)[0]

    expected = DataLoader(Numbers(sample), BATCH, collate_fn=COLLATES[collate])  # type: ignore[arg-type]

    assert [summary(x) for x in load(sample, COLLATES[collate])] == [summary(x) for x in expected]


def test_memory_of_deleted_batches_is_used_again() -> None:
    addresses = [(x.data_ptr(), y.data_ptr()) for x, y in load(SAMPLES["tensor and number"], length=50 * BATCH)]

    # Of two tensors each: one that trains, one that comes, two that are loaded ahead, and one that is made. Either
    # tensor fits in each block, and on a busy machine one of them came in more than half of the blocks.
    assert len(addresses) == 50
    assert len(set(sum(addresses, ()))) <= 2 * 5


@pytest.mark.parametrize(
    "part",
    [lambda x: x, lambda x: x[1:], lambda x: x.view(-1)[3], lambda x: x.numpy(), lambda x: x.detach().flatten()],
    ids=["whole", "slice", "number", "array", "detached"],
)
def test_what_is_kept_of_a_batch_keeps_its_values(part: Callable[[Tensor], Any]) -> None:
    kept, values = [], []
    # More than there are blocks.
    for batch in load(rows, length=(shared_batches.MAX_BLOCKS + 10) * BATCH):
        kept.append(part(batch))
        values.append(kept[-1].tolist())

    assert [each.tolist() for each in kept] == values


def test_a_forked_process_frees_no_memory_of_its_parent() -> None:
    """A child's collector may delete its copy of a batch, which the parent still reads."""
    batches = load(rows, length=40 * BATCH)
    kept = next(batches)
    values = kept.tolist()
    if (child := os.fork()) == 0:
        del kept
        os._exit(0)
    os.waitpid(child, 0)

    for _ in batches:
        assert kept.tolist() == values


def test_each_pass_with_new_processes_has_its_own_memory() -> None:
    batches = loader(Numbers(rows), num_workers=2)
    first = list(batches)
    values = [batch.tolist() for batch in first]

    for _ in range(3):
        assert [batch.tolist() for batch in batches] == values
    assert [batch.tolist() for batch in first] == values


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_processes_that_are_started_anew_send_the_same_batches(method: str) -> None:
    """Python's way from 3.14 on, and that of other systems."""
    kept = list(loader(Numbers(rows, 40 * BATCH), 1, default_collate, method))

    assert [batch.tolist() for batch in kept] == [batch.tolist() for batch in load(rows, length=40 * BATCH)]


def mapped_bytes() -> int:
    """The shared memory of PyTorch that this process has mapped."""
    ranges = [
        line.split()[0].split("-")
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "/torch_" in line
    ]
    return sum(int(end, 16) - int(begin, 16) for begin, end in ranges)


def test_batches_of_various_lengths_share_their_memory() -> None:
    """All of a block is taken from /dev/shm when it is made, of which a container has 64 MB by default."""
    lengths = [10_000 + 997 * number % 70_000 for number in range(60)]
    largest = 8 * BATCH * max(lengths)

    def sample(index: int) -> Tensor:
        return torch.full((lengths[index // BATCH],), index)

    before, most = mapped_bytes(), 0
    for batch in load(sample, length=len(lengths) * BATCH):
        assert batch[:, -1].tolist() == batch[:, 0].tolist()
        most = max(most, mapped_bytes() - before)

    # One that trains, one that comes, two that are loaded ahead, and one that is made; of two sizes at most.
    assert most < 2 * 5 * 1.125 * largest


def test_two_passes_at_once_do_not_mix_their_memory() -> None:
    """Their loader processes have the same number; the trainer makes one pass at a time."""
    batches = loader(Numbers(rows, 400))

    with pytest.raises(KeyError):
        all(one.equal(other) for one, other in zip(batches, batches, strict=True))


def test_an_error_of_a_batch_frees_its_memory() -> None:
    """Samples of two shapes, in a loader that goes on: its blocks are not lost."""

    class Odd:
        def __len__(self) -> int:
            return 200

        def __getitem__(self, index: int) -> Tensor:
            return torch.full((2 if index % 8 == 1 else 3,), index)

    batches = iter(loader(Odd()))
    addresses = set()
    for _ in range(25):
        with pytest.raises(RuntimeError, match="stack expects each tensor to be equal size"):
            next(batches)
        addresses.add(next(batches).data_ptr())

    assert next(batches, None) is None
    assert len(addresses) <= 6
