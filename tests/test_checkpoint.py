"""Checkpoints at epoch ends: a resumed run equals an undisturbed one; a damaged checkpoint is not believed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from launchers import QUICKEST, launch, requires

from hvd_trainer import checkpoint
from hvd_trainer.errors import CheckpointError

STATE = {"model": {"w": torch.arange(3.0)}, "progress": {"step": 7}}


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 7, STATE)
    assert path.name == "step-000000007"
    loaded = checkpoint.load(path)
    assert torch.equal(loaded["model"]["w"], STATE["model"]["w"])
    assert not list(tmp_path.glob(".*")), "nothing temporary is left"


def test_the_newest_two_are_kept(tmp_path: Path) -> None:
    for step in (1, 20, 3):
        checkpoint.save(tmp_path, step, STATE)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000000003", "step-000000020"]


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda p: _flip(p / "state.pt"), id="flipped"),
        pytest.param(lambda p: (p / "state.pt").write_bytes((p / "state.pt").read_bytes()[:100]), id="cut"),
        pytest.param(lambda p: (p / "manifest.json").unlink(), id="no-manifest"),
        pytest.param(lambda p: (p / "manifest.json").write_text("{"), id="torn-manifest"),
        pytest.param(lambda p: (p / "manifest.json").write_text("[]"), id="foreign-manifest"),
        pytest.param(lambda p: (p / "state.pt").unlink(), id="no-state"),
    ],
)
def test_a_damaged_one_is_refused_and_an_older_one_taken(tmp_path: Path, damage: object) -> None:
    checkpoint.save(tmp_path, 1, {**STATE, "progress": {"step": 1}})
    newest = checkpoint.save(tmp_path, 2, STATE)
    damage(newest)  # type: ignore[operator]
    with pytest.raises(CheckpointError, match="step-000000002"):
        checkpoint.load(newest)
    state, said = checkpoint.restore(tmp_path, "auto")
    assert state is not None
    assert state["progress"] == {"step": 1}
    assert any("step-000000002" in line for line in said), "what was refused is said"


def test_a_pickle_is_not_run(tmp_path: Path) -> None:
    """A checkpoint from a stranger may hold code: it is refused even where its manifest fits."""

    class Code:
        def __reduce__(self) -> object:
            return (Path.touch, (tmp_path / "ran",))

    path = checkpoint.save(tmp_path / "c", 1, {"model": Code()})
    with pytest.raises(CheckpointError):
        checkpoint.load(path)
    assert not (tmp_path / "ran").exists()


def test_a_full_disk_leaves_the_old_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = checkpoint.save(tmp_path, 1, STATE)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "_sync", full)
    with pytest.raises(CheckpointError, match=r"No space left.*Older ones are intact"):
        checkpoint.save(tmp_path, 2, STATE)
    assert [p.name for p in tmp_path.iterdir()] == [old.name]
    checkpoint.load(old)


@requires("horovod")
def test_resume_equals_an_undisturbed_run(tmp_path: Path) -> None:
    """Dropout, Adam's state, warm-up and the data order go on: one epoch and one more is two, on either engine."""
    job = [
        "-m",
        "hvd_trainer.mnist",
        "--dataset",
        "digits",
        "--batch-size",
        "64",
        "--lr-scaling",
        "linear",
        "--warmup-epochs",
        "1.5",
    ]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    launch(QUICKEST, 2, [*job, "--backend", "ddp", "--epochs", "2", "--log-dir", str(whole)])
    launch("horovodrun", 2, [*job, "--backend", "horovod", "--epochs", "1", "--log-dir", str(parts)])
    again = launch(
        QUICKEST, 2, [*job, "--backend", "ddp", "--epochs", "2", "--log-dir", str(parts), "--resume", "auto"]
    )
    assert "at epoch 2" in again.stdout
    assert (whole / "model.safetensors").read_bytes() == (parts / "model.safetensors").read_bytes()
    events = [json.loads(line) for line in (parts / "metrics.jsonl").read_text().splitlines()]
    assert [e["epoch"] for e in events if e["event"] == "epoch"] == [1, 2]


def test_a_wrong_path_is_an_error(tmp_path: Path) -> None:
    job = [
        "-m",
        "hvd_trainer.mnist",
        "--backend",
        "single",
        "--dataset",
        "digits",
        "--resume",
        str(tmp_path / "none"),
    ]
    result = launch("python", 1, job, check=False)
    assert result.returncode == 2
    assert "is not a whole checkpoint" in result.stderr
    assert "Traceback" not in result.stderr
