"""Trackers of other packages, offline."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from launchers import REPOSITORY
from torch import nn
from trainings import fit, options_of, signs
from waiting import PATIENCE_S

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
        ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S)
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


class Server:
    """A stand-in for MLflow whose server is away for some calls of a function."""

    def __init__(self, function: str, calls: set[int]) -> None:
        self.function, self.calls, self.sent = function, calls, []
        self.counts = {"start_run": 0, "log_metrics": 0, "end_run": 0}

    def start_run(self, **settings: Any) -> SimpleNamespace:
        return self._call("start_run", None)

    def log_params(self, options: dict[str, Any]) -> None:
        assert options["epochs"] == 3

    def log_metrics(self, figures: dict[str, float], step: int) -> None:
        self._call("log_metrics", step)

    def end_run(self) -> None:
        self._call("end_run", "end")

    def _call(self, function: str, sent: Any) -> SimpleNamespace:
        self.counts[function] += 1
        if function == self.function and self.counts[function] in self.calls:
            raise ConnectionError("the server is away")
        self.sent.append(sent)
        return SimpleNamespace()


@pytest.mark.parametrize(
    ("function", "calls", "sent"),
    [
        # Three epochs of five steps, a line after every second, one after each epoch, and the end.
        ("log_metrics", {1}, [None, 5, 6, 8, 10, 10, 12, 14, 15, 15, "end"]),
        ("log_metrics", {3, 4}, [None, 2, 4, 15, 15, "end"]),
        ("start_run", {1, 2}, [None, 10, 12, 14, 15, 15, "end"]),
        ("end_run", {1}, [None, 2, 4, 5, 6, 8, 10, 10, 12, 14, 15, 15]),
    ],
)
def test_tracker_that_fails_does_not_end_the_training(
    function: str,
    calls: set[int],
    sent: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A server that was away for a moment ended a training of days."""
    server = Server(function, calls)
    monkeypatch.setitem(sys.modules, "mlflow", server)  # type: ignore[arg-type]
    options = options_of(epochs=3, batch_size=8, log_every=2)
    history = fit(options, nn.Linear(6, 2), signs(40), callbacks=[MLflowTracker()])
    assert [record["step"] for record in history] == [5, 10, 15]
    assert server.sent == sent
    warnings = [record.message for record in caplog.records if "mlflow" in record.message]
    assert warnings == [
        "warning: mlflow sends nothing for now (ConnectionError: the server is away); the training continues"
    ]
