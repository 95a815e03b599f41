"""Tensors that are read from the files of a checkpoint, into new tensors or into those of a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from hvd_trainer.checkpoint import storage, stored
from hvd_trainer.checkpoint.stored import StateReader, StoredTensor, new_like, stored_tensors
from hvd_trainer.utils.tensors import as_bytes

LARGE = 3000  # bytes and more are read later


def images() -> Tensor:
    return torch.arange(4 * 3 * 10 * 10).float().view(4, 3, 10, 10).contiguous(memory_format=torch.channels_last)


STATE: dict[str, Any] = {
    "model": {
        "plain": torch.arange(LARGE).view(-1, 3),
        "images": images(),
        "complex": torch.arange(LARGE).to(torch.complex128).view(3, -1),
        "half": torch.arange(LARGE).to(torch.bfloat16),
        "small": torch.tensor(3.5),
        "none": torch.empty(0, 3),
        "extra._extra_state": [torch.arange(LARGE), {"text": 1}],
    },
    "optimizer": {"state": {0: {"step": torch.tensor(2.0), "mean": torch.ones(LARGE)}}},
    "ranks": [{"random": torch.arange(LARGE)}],
}


@pytest.fixture
def opened(tmp_path: Path) -> storage.OpenCheckpoint:
    return storage.open_checkpoint(checkpoints.save(tmp_path, STATE))


def test_large_tensors_stay_in_the_files(opened: storage.OpenCheckpoint) -> None:
    state = opened.state()
    assert isinstance(state["model"]["plain"], StoredTensor)
    assert isinstance(state["optimizer"]["state"][0]["mean"], StoredTensor)
    assert isinstance(state["model"]["small"], Tensor)
    assert isinstance(state["ranks"][0]["random"], Tensor), "whoever gets it needs it as it is"


def test_loaded_tensors_have_their_bits_and_their_layout(opened: storage.OpenCheckpoint) -> None:
    loaded = StateReader().load(opened.state())
    for name, tensor in STATE["model"].items():
        if isinstance(tensor, Tensor):
            assert loaded["model"][name].equal(tensor), name
            assert loaded["model"][name].stride() == tensor.stride(), name
    assert loaded["model"]["extra._extra_state"][0].equal(torch.arange(LARGE))
    assert loaded["optimizer"]["state"][0]["mean"].equal(torch.ones(LARGE))


@pytest.mark.parametrize("piece_bytes", [7, 2**25])
def test_tensors_are_filled_where_they_are(
    piece_bytes: int, opened: storage.OpenCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "PIECE_BYTES", piece_bytes)
    saved = opened.state()["model"]
    targets = {
        name: torch.zeros_like(tensor) for name, tensor in STATE["model"].items() if isinstance(tensor, Tensor)
    }
    targets["images"] = targets["images"].contiguous()  # other than in the file
    targets["plain"] = torch.zeros(3, LARGE // 3, dtype=torch.int64).t()
    places = {name: tensor.data_ptr() for name, tensor in targets.items()}
    StateReader().fill([(saved[name], tensor) for name, tensor in targets.items()])
    for name, tensor in targets.items():
        assert tensor.equal(STATE["model"][name]), name
        assert tensor.data_ptr() == places[name], name


def test_described_checkpoint_is_the_same(opened: storage.OpenCheckpoint) -> None:
    described = storage.OpenCheckpoint.of_description(opened.describe()).state()["model"]
    state = opened.state()["model"]
    assert [described[name].like.stride() for name in ("plain", "images", "complex")] == [
        state[name].like.stride() for name in ("plain", "images", "complex")
    ]
    assert described["small"].equal(STATE["model"]["small"])


def in_files(folder: Path, parts: Sequence[Tensor]) -> StoredTensor:
    files = [folder / f"{number}.safetensors" for number in range(len(parts))]
    for file, part in zip(files, parts, strict=True):
        save_file({"w": part.contiguous()}, file)
    return stored_tensors(files)["w"]


@pytest.mark.parametrize("sizes", [[5], [2, 3], [2, 2, 1, 0], [0, 5], [1] * 5], ids=str)
def test_rows_are_read_from_the_files_that_have_them(sizes: list[int], tmp_path: Path) -> None:
    whole = torch.arange(20).view(5, 4)
    saved = in_files(tmp_path, whole.split(sizes))
    assert new_like(saved).shape == whole.shape
    for first in range(5):
        for end in range(first, 6):
            rows = torch.zeros(end - first, 4, dtype=whole.dtype)
            saved.read(as_bytes(rows), first * 4 * 8)
            assert rows.equal(whole[first:end])


@pytest.mark.parametrize("other", [torch.zeros(2, 3), torch.zeros(2, 4).long(), torch.tensor(1.0)], ids=str)
def test_rows_of_several_kinds_are_refused(other: Tensor, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="w has rows of several kinds"):
        in_files(tmp_path, [torch.zeros(2, 4), other])


def test_file_that_shrinks_is_an_error(tmp_path: Path) -> None:
    """It is verified, and read later: a mapped file would have ended the process by SIGBUS."""
    saved = in_files(tmp_path, [torch.arange(1000)])
    file = tmp_path / "0.safetensors"
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(storage.CheckpointError, match=r"0\.safetensors is shorter"):
        StateReader().load(saved)
