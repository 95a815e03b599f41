"""Copies of a run's state for the writer."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import checkpoints
import pytest
import torch
from torch import Tensor

from hvd_trainer.checkpoint import async_writer as saver_module
from hvd_trainer.checkpoint import storage
from hvd_trainer.checkpoint.async_writer import AsyncWriter, PinnedMemory, copy_to_host, place_in_blocks
from hvd_trainer.checkpoint.manager import CheckpointManager
from hvd_trainer.config.options import SaveOptions
from hvd_trainer.utils import accelerator


@pytest.fixture
def _blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copy CPU tensors into blocks of memory, as an accelerator's are, which is shown in tests/pretend."""
    monkeypatch.setattr(accelerator, "is_host", lambda _: False)
    monkeypatch.setattr(accelerator, "synchronize", lambda _: None)
    monkeypatch.setattr(accelerator, "pinned", lambda shape, dtype: torch.empty(shape, dtype=dtype))


def state(number: int) -> dict[str, Any]:
    """Return a state with tensors of several types and layouts."""
    return {
        "model": collections.OrderedDict(
            half=torch.full((3,), number, dtype=torch.bfloat16),
            image=torch.full((1, 2, 3, 3), float(number)).contiguous(memory_format=torch.channels_last),
            nothing=torch.empty(0, 4),
        ),
        "optimizer": {0: [torch.tensor(number), (torch.tensor([True, False]), "text")]},
        "kinds": collections.Counter(a=number),
    }


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and one.stride() == other.stride() and one.equal(other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


@pytest.fixture
def saver(tmp_path: Path) -> Iterator[AsyncWriter]:
    with AsyncWriter(tmp_path, SaveOptions(keep=5)) as made:
        yield made


def submit(saver: AsyncWriter, number: int) -> None:
    saver.submit(time.perf_counter(), state(number), step=number, epoch=0, figures={})


def test_on_host_copies_cpu_tensors() -> None:
    before = state(1)
    copied = copy_to_host(before, PinnedMemory()).state()
    assert equal(copied, before)
    assert copied["model"]["image"].data_ptr() != before["model"]["image"].data_ptr()


@pytest.mark.parametrize(
    ("sizes", "least", "block", "places"),
    [
        ([1], 0, 64, [(0, 0)]),
        ([64, 65, 1], 0, 256, [(0, 0), (0, 64), (0, 192)]),
        ([300] * 9, 0, 512, [(number, 0) for number in range(9)]),
        ([300] * 3, 1024, 1024, [(0, 0), (0, 320), (0, 640)]),
        ([0, 64, 0], 0, 64, [(0, 0), (0, 0), (0, 64)]),
    ],
)
def test_placed_packs_tensors_into_blocks(
    sizes: list[int], least: int, block: int, places: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saver_module, "MAX_SINGLE_BLOCK_BYTES", 256)
    assert place_in_blocks(sizes, least) == (block, places)


def test_placed_wastes_little_memory() -> None:
    """Tensors of 172 MB, as in models of 7 billion parameters, took 1.5 times as much when rounded up."""
    sizes = [172 * 2**20] * 400
    block, places = place_in_blocks(sizes)
    assert block * (places[-1][0] + 1) < 1.15 * sum(sizes)


@pytest.mark.usefixtures("_blocks")
def test_writer_writes_the_state_only(saver: AsyncWriter, tmp_path: Path) -> None:
    """The block of memory that the copied tensors are slices of must not be written as a whole."""
    saver._memory._blocks = [torch.empty(2**20, dtype=torch.uint8)]
    submit(saver, 1)
    saver.wait()
    assert equal(checkpoints.load(tmp_path / "step-000000001"), state(1))
    assert (tmp_path / "step-000000001" / "state.safetensors").stat().st_size < 10_000


def test_submit_waits_for_the_save_before(
    saver: AsyncWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write, save = threading.Event(), storage.save

    def slow(*args: Any, **kwargs: Any) -> Path:
        assert may_write.wait(10)
        return save(*args, **kwargs)

    monkeypatch.setattr(storage, "save", slow)
    submit(saver, 1)
    following = threading.Thread(target=submit, args=(saver, 2))
    following.start()
    may_write.set()
    following.join()
    saver.wait()
    for number in (1, 2):
        assert equal(checkpoints.load(tmp_path / f"step-{number:09d}"), state(number))


def test_save_stall_excludes_steps_that_still_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """`save_stall_s` began when the host was done with a step, and the accelerator was steps behind."""
    backend = SimpleNamespace(
        session=SimpleNamespace(driver=None),
        device=torch.device("meta"),
        activity=SimpleNamespace(enter=lambda phase: None),
    )
    began: list[float] = []
    mine: Any = SimpleNamespace(
        backend=backend,
        before_save=lambda: settled.append(time.perf_counter()),
        state=SimpleNamespace(collect=lambda meter, everywhere: None),
        progress=SimpleNamespace(step=1, epoch=0, evaluation={}),
        _writer=SimpleNamespace(submit=lambda at, state, **_: began.append(at)),
    )
    settled: list[float] = []
    monkeypatch.setattr(accelerator, "synchronize", lambda _: settled.append(time.perf_counter()))
    CheckpointManager._save(mine, None, to_disk=True)
    assert settled[0] < began[0] < settled[1], "synchronize, the clock, and then the guard"
