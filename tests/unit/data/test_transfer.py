"""What is copied to an accelerator, and from where; batches stay on the CPU, so that they can be looked at."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from data_checks import Stream
from torch import Tensor

from hvd_trainer.data import DataShard, LoaderPlan, TensorData, make_loader, mean_samples, samples_taken
from hvd_trainer.data.transfer import Transfer
from hvd_trainer.launch.world import World
from hvd_trainer.observe import summary
from hvd_trainer.utils import accelerator
from hvd_trainer.utils.tensors import tensors_in

DEVICE = torch.device("meta")
"""Stands for the accelerator; batches that are sent there stay where they are, so that they can be looked at."""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Simulate a machine whose only device is an accelerator; note what it is asked for."""
    made = SimpleNamespace(calls=[], free=1000)

    class Sent:
        """Stands for a `Transfer`, and notes what it copies."""

        def __init__(self, device: torch.device) -> None:
            pass

        def move(self, batches: Iterable[Any]) -> Iterator[Any]:
            for batch in batches:
                made.calls.append(f"copy {[tensor.tolist() for tensor in tensors_in(batch)]}")
                yield batch

    def pinned(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        made.calls.append(f"pin {tuple(shape)} of {dtype}")
        return torch.empty(shape, dtype=dtype)

    monkeypatch.setattr("hvd_trainer.data.loader.Transfer", Sent)
    monkeypatch.setattr(accelerator, "is_host", lambda _: False)
    monkeypatch.setattr(accelerator, "pinned", pinned)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda _: (made.free, made.free))
    return made


def backend(device: torch.device = DEVICE) -> Any:
    return SimpleNamespace(
        world=World(0, 1, 0, 1, 0, 1, "python"), device=device, session=SimpleNamespace(peers=[])
    )


def test_cpu_prefetches_nothing() -> None:
    fetched = []

    def batches() -> Iterator[Tensor]:
        for number in range(3):
            fetched.append(number)
            yield torch.tensor([number])

    assert next(Transfer(torch.device("cpu")).move(batches())).tolist() == [0]
    assert fetched == [0]


class Halve:
    """A transform that halves the pixels."""

    deterministic = True

    def __call__(self, inputs: Tensor) -> Tensor:
        return inputs / 2


def pixels(count: int) -> TensorData:
    """Return data whose sample i has the pixel i, of 9 bytes each."""
    inputs = torch.arange(count, dtype=torch.uint8).unsqueeze(1)
    return TensorData(inputs, torch.arange(count), Halve(), name="pixels")


def test_pixels_are_sent_as_bytes_from_pinned_memory(
    gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pixels were gathered in pageable memory first, and copied to pinned memory from there."""
    monkeypatch.setattr(Tensor, "pin_memory", lambda *_: pytest.fail("one copy too many"))
    gpu.free = 0
    loader = make_loader(pixels(6), backend(), LoaderPlan(4, shuffle=False))
    batches = [(inputs.tolist(), targets.tolist()) for inputs, targets in loader.epoch(0)]
    assert batches == [([[0.0], [0.5], [1.0], [1.5]], [0, 1, 2, 3]), ([[2.0], [2.5]], [4, 5])]
    assert gpu.calls == [
        *("pin (4, 1) of torch.uint8", "pin (4,) of torch.int64", "copy [[[0], [1], [2], [3]], [0, 1, 2, 3]]"),
        *("pin (2, 1) of torch.uint8", "pin (2,) of torch.int64", "copy [[[4], [5]], [4, 5]]"),
    ]


@pytest.mark.parametrize(("free", "sent"), [(901, False), (900, True)])
def test_small_data_stay_on_the_accelerator(free: int, sent: bool, gpu: SimpleNamespace) -> None:
    """Data took up to half of what was free before the model came, and as much again for the test."""
    gpu.free = free
    loader = make_loader(pixels(10), backend(), LoaderPlan(4))
    assert loader.is_sent == sent


@pytest.mark.parametrize(
    ("train", "test", "said"),
    [
        (False, False, "; all in the GPU's memory"),
        (False, None, "; all in the GPU's memory"),
        (True, False, "; those to train on are sent from the host"),
        (True, True, "; those to train on and to validate on are sent from the host"),
    ],
)
@pytest.mark.usefixtures("gpu")
def test_summary_says_where_the_data_are(train: bool, test: bool | None, said: str) -> None:
    def loader(sent: bool | None) -> Any:
        return None if sent is None else SimpleNamespace(name="digits", num_samples=20, is_sent=sent)

    trainer: Any = SimpleNamespace(device=DEVICE, train_loader=loader(train), val_loader=loader(test))
    assert summary._data(trainer).endswith(f"to validate on{said}")


def test_summary_on_a_cpu_omits_where_data_are() -> None:
    loader: Any = SimpleNamespace(name="digits", num_samples=20, is_sent=False)
    trainer: Any = SimpleNamespace(device=torch.device("cpu"), train_loader=loader, val_loader=None)
    assert summary._data(trainer) == "digits: 20 samples to train on, none to validate on"


def test_stream_agreement_uses_no_accelerator() -> None:
    """Agreement by tensors of the accelerator made each step wait for all of its work."""
    asked = []

    def all_reduce_numbers(values: list[float]) -> list[float]:
        *counts, fingerprint = values
        asked.append(counts)
        return [*(count + 1 for count in counts), 2 * fingerprint]

    mine = backend(torch.device("cpu"))
    mine.collectives = SimpleNamespace(all_reduce_numbers=all_reduce_numbers)
    mine.world = SimpleNamespace(rank=0, size=2)
    loader = make_loader(Stream(3), mine, LoaderPlan(2, num_workers=0, shard=DataShard(0, 2)))
    assert [(b[0].tolist(), mean_samples(b), samples_taken(b, 2)) for b in loader.epoch(0)] == [
        ([[0], [2]], 1.5, 3)
    ]
    assert asked == [[1, 2, 2], [0, 0, 0]]
