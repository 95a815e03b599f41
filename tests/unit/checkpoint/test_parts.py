"""Checkpoints that several ranks write: threads stand for their writers, and share a store as ranks do."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import checkpoints
import pytest
import torch
import torch.distributed as dist

from hvd_trainer.checkpoint import parts as parts_module
from hvd_trainer.checkpoint import storage
from hvd_trainer.checkpoint.parts import CheckpointParts, merge_trees
from hvd_trainer.checkpoint.storage import OpenCheckpoint
from hvd_trainer.errors import CheckpointError

HOSTS = ("alpha", "beta", "gamma")


@pytest.fixture
def ranks() -> Iterator[list[CheckpointParts]]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    peers, given_up = [SimpleNamespace(host=host) for host in HOSTS], threading.Event()

    def session(rank: int) -> Any:
        return SimpleNamespace(world=SimpleNamespace(rank=rank, size=3), peers=peers, store=store)

    yield [CheckpointParts(session(rank), "0.0", given_up) for rank in range(3)]
    given_up.set()


WHOLE = torch.arange(3000).view(6, -1).clone()
OF_RANK: list[dict[str, Any]] = [
    {"model": {"rows": WHOLE[:4], "own": torch.tensor(1)}, "optimizer": {"lr": 0.1, "state": {}}, "ranks": [7]},
    {"model": {"rows": WHOLE[4:]}, "optimizer": {"state": {1: {"step": None, "mean": torch.ones(3)}}}},
    {"model": {}, "optimizer": {"state": {}}},
]


def save(ranks: list[CheckpointParts], folder: Path) -> Path:
    """Save as three ranks do; raise the error of rank 0."""
    with ThreadPoolExecutor(2) as pool:
        written: list[Future[None]] = [
            pool.submit(ranks[rank].write, OpenCheckpoint.of_state(OF_RANK[rank])) for rank in (1, 2)
        ]
        try:
            return checkpoints.save(folder, OF_RANK[0], step=3, others=ranks[0])
        finally:
            ranks[0]._given_up.set()
            for part in written:
                part.exception()


def test_parts_of_all_ranks_are_one_state(ranks: list[CheckpointParts], tmp_path: Path) -> None:
    path = save(ranks, tmp_path)
    names = {"manifest.json", "state.json", "state.safetensors", "state-00001.safetensors"}
    assert {file.name for file in path.iterdir()} == names, "and no file of a rank that has nothing"
    loaded = checkpoints.load(path)
    assert loaded["model"]["rows"].equal(WHOLE)
    assert loaded["optimizer"]["lr"] == 0.1
    assert loaded["optimizer"]["state"][1]["mean"].equal(torch.ones(3))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda file: file.write_bytes(file.read_bytes()[:-1] + b"!"), "damaged: state-00001"),
        (lambda file: file.write_bytes(file.read_bytes()[:-1]), "damaged: state-00001"),
        (lambda file: file.unlink(), "No such file .*state-00001"),
    ],
    ids=["changed", "cut", "missing"],
)
def test_damaged_part_is_refused(
    damage: Callable[[Path], Any], words: str, ranks: list[CheckpointParts], tmp_path: Path
) -> None:
    path = save(ranks, tmp_path)
    damage(path / "state-00001.safetensors")
    with pytest.raises(CheckpointError, match=words):
        checkpoints.load(path)


def test_part_with_a_path_for_a_name_is_refused(ranks: list[CheckpointParts], tmp_path: Path) -> None:
    path = save(ranks, tmp_path)
    manifest = storage.msgspec.json.decode((path / "manifest.json").read_bytes())
    del manifest["self"]
    manifest["parts"] = {"../../state-00001.safetensors": manifest["tensors"]}
    content = manifest | {"self": storage._digest(manifest)}
    (path / "manifest.json").write_bytes(storage.msgspec.json.encode(content))
    with pytest.raises(CheckpointError, match=r"manifest.json: .*matching regex"):
        checkpoints.load(path)


def test_hosts_that_share_no_folder_are_named(
    ranks: list[CheckpointParts], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank on another host does not see the folder that rank 0 has made."""
    is_dir = Path.is_dir
    monkeypatch.setattr(Path, "is_dir", lambda path: "." not in path.name and is_dir(path))
    with pytest.raises(
        CheckpointError, match=r"state-00001\.safetensors cannot be .* of alpha is not on beta. With"
    ):
        save(ranks, tmp_path)
    assert not list(tmp_path.iterdir()), "nothing is left"


def test_part_that_only_its_host_sees_is_named(
    ranks: list[CheckpointParts], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_file = Path.is_file
    monkeypatch.setattr(Path, "is_file", lambda path: path.name != "state-00001.safetensors" and is_file(path))
    with pytest.raises(CheckpointError, match=r"state-00001.* was written on beta, is not on alpha\. With"):
        save(ranks, tmp_path)


def test_error_of_one_rank_ends_the_save(
    ranks: list[CheckpointParts], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: Path, tensors: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(parts_module, "write_tensors", full)
    with pytest.raises(CheckpointError, match=r"state-00001\.safetensors cannot be written on beta: .*No space"):
        save(ranks, tmp_path)
    assert not list(tmp_path.iterdir())


def test_rank_0_that_cannot_write_keeps_none_waiting(ranks: list[CheckpointParts], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="Not a directory"):
        save(ranks, tmp_path / "file")


def test_writer_gives_up_a_lost_rank_at_the_end(ranks: list[CheckpointParts], tmp_path: Path) -> None:
    """Rank 0's thread would have kept the process, and waited for the part of a rank that has died."""
    ranks[0]._given_up.set()
    with pytest.raises(CheckpointError, match="another rank did not write its part before the job ended"):
        checkpoints.save(tmp_path, OF_RANK[0], step=3, others=ranks[0])
    assert not list(tmp_path.iterdir())


def test_merge_takes_what_a_rank_has() -> None:
    one = {"a": {"$dict": [[1, {"x": None, "y": 2}]]}, "b": {}}
    other = {"a": {"$dict": [[1, {"x": 5, "y": 3}], [2, {"z": 1}]]}, "b": {"$dict": [[0, 9]]}, "c": [1]}
    merged = {"a": {"$dict": [[1, {"x": 5, "y": 2}], [2, {"z": 1}]]}, "b": {"$dict": [[0, 9]]}, "c": [1]}
    assert merge_trees(one, other) == merged
