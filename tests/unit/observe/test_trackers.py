"""Trackers of other packages, offline."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from launchers import REPOSITORY

from hvd_trainer import MLflowTracker, OptionError

EXAMPLE = [str(REPOSITORY / "examples" / "own_data.py"), "--epochs", "2", "--log-every", "50", "--tracker"]


def train(tracker: str, folder: Path, **variables: str) -> str:
    """Run the example in a folder, and return what it has printed."""
    if importlib.util.find_spec(tracker) is None:
        pytest.skip(f"{tracker} is not installed: pip install 'hvd_trainer[{tracker}]'")
    command = [sys.executable, *EXAMPLE, tracker]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"PYTHONPATH": str(REPOSITORY), **variables}.items():
            patch.setenv(name, value)
        ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout + ran.stderr


def test_wandb_gets_options_and_figures(tmp_path: Path) -> None:
    train("wandb", tmp_path, WANDB_MODE="offline", WANDB_SILENT="true")
    (kept,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    written = kept.read_bytes()
    for name in (b"hidden", b"step/train_loss", b"epoch/val_mae", b"end/peak_memory_mb"):
        assert name in written


def test_mlflow_gets_options_and_figures(tmp_path: Path) -> None:
    train("mlflow", tmp_path, MLFLOW_TRACKING_URI=(tmp_path / "store").as_uri(), MLFLOW_ALLOW_FILE_STORE="true")
    (loss,) = tmp_path.glob("store/*/*/metrics/epoch/val_loss")
    assert [line.split()[2] for line in loss.read_text().splitlines()] == ["40", "80"]
    assert (loss.parents[2] / "params" / "hidden").read_text() == "64"
    assert "status: 3" in (loss.parents[2] / "meta.yaml").read_text(), "it has not ended"


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(OptionError, match=r"MLflowTracker needs mlflow. Type: pip install .*\[mlflow\]'"):
        MLflowTracker()
