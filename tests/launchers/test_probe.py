"""The probe that records the steps of scripts which are not built on the Trainer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from waiting import PATIENCE_S

from hvd_trainer.measure.listener import End, Step
from hvd_trainer.measure.measured import MeasuredTrial
from hvd_trainer.measure.message import Message
from hvd_trainer.measure.steps import StepRecorder
from hvd_trainer.measure.trials import TrialRunner
from hvd_trainer.observe.phases import PHASES, Clock
from hvd_trainer.utils import accelerator

pytestmark = pytest.mark.warm
SCRIPT = """
import time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(40, 4))
optimizer.step()  # as Horovod's broadcast_optimizer_state does
for epoch in range(3):
    for (batch,) in DataLoader(data, batch_size=8):
        optimizer.zero_grad()
        model(batch).sum().backward()
        time.sleep(0.01)
        optimizer.step()
    with torch.no_grad():
        for (batch,) in DataLoader(data, batch_size=20):
            model(batch)
"""


def recorded(folder: Path) -> float:
    """Return the peak memory of one step, in MB, as it is recorded."""
    times = StepRecorder(folder, 0)
    times.on_start(torch.device("cpu"), on_trainer=False)
    times.on_step_end(Step(1, 1.0))
    times.on_end(End({}, {}, ""))
    with np.load(folder / "steps" / "rank-0.npz") as found:
        return float(json.loads(str(found["results"]))["peak_memory_mb"])


def test_probe_records_memory_of_the_accelerator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's memory was compared with a trainer's memory on a GPU."""
    assert recorded(tmp_path) > 50, "of the process, which has imported PyTorch"
    clock = Clock(torch.device("cpu"))
    monkeypatch.setattr(accelerator, "is_host", lambda _: False)
    monkeypatch.setattr(accelerator, "synchronize", lambda _: None)
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda _: 3 * 2**20)
    monkeypatch.setattr("hvd_trainer.measure.steps.Clock", lambda device: clock)
    monkeypatch.setattr(accelerator, "name", lambda _: "a GPU")
    assert recorded(tmp_path / "other") == 3


def test_steps_of_a_training_that_has_failed_are_not_counted(tmp_path: Path) -> None:
    """They had rows without seconds: the speed of the training after it was too high."""
    times = StepRecorder(tmp_path, 0)
    for number in range(2):
        times.on_start(torch.device("cpu"), on_trainer=True)
        times.on_step_end(Step(8, 1.0 + number))
    times.on_end(End({}, {}, ""))
    with np.load(tmp_path / "steps" / "rank-0.npz") as arrays:
        assert (len(arrays["seconds"]), arrays["lr"].tolist()) == (1, [2.0])


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("loss.backward(); model.weight.data -= model.weight.grad", "a tool sees no update by hand"),
        ("optimizer.step()", "no backward() before them"),
        ("pass", "is it asked to train, and in this process?"),
    ],
)
def test_a_script_without_a_step_that_counts_is_told_what_was_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, reason: str
) -> None:
    """It was said to have ended without having trained, whatever it had done."""
    (tmp_path / "train.py").write_text(
        "import torch\nmodel = torch.nn.Linear(2, 1)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        f"loss = model(torch.ones(2)).sum()\n{code}\n"
    )
    monkeypatch.chdir(tmp_path)
    run = TrialRunner(tmp_path / "out").run(MeasuredTrial(job=["train.py"], engine="single", ranks=1))
    assert (run.state, run.note.startswith("it took no optimizer step that counts: ")) == ("failed", True)
    assert reason in run.note


@pytest.mark.parametrize("max_steps", [None, 7])
def test_probe_records_steps_and_samples_of_a_script(tmp_path: Path, max_steps: int | None) -> None:
    """Batches of the evaluation are not trained on; a step without a backward pass is none."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    probe = Message(log_dir=str(tmp_path / "log"), max_steps=max_steps)
    command = [sys.executable, "-m", "hvd_trainer", "run", "--", str(script)]
    subprocess.run(command, env={**os.environ, **probe.variables()}, check=True, timeout=PATIENCE_S)
    with np.load(tmp_path / "log" / "steps" / "rank-0.npz") as found:
        steps = 15 if max_steps is None else max_steps
        assert found["step"].tolist() == list(range(1, steps + 1))
        assert found["samples"].tolist() == [8] * steps
        parts = dict(zip(PHASES, found["seconds"][1:].mean(axis=0), strict=True))
        assert parts["forward"] > 0.01 > parts["backward"] > 0
        assert min(parts["data"], parts["step"]) > 0
