"""The probe that measures other people's scripts: the memory that it records."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from accelerator_stand_in import StandIn

from hvd_trainer.tools.runner.step_probe import Probe


def recorded(folder: Path) -> float:
    """Return the peak memory of one step, in MB, as the probe records it."""
    probe = Probe(folder, 0)
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    probe._gradients = True
    probe._before_step()
    probe._after_step(optimizer)
    probe._write()
    with np.load(folder / "steps" / "rank-0.npz") as found:
        return float(found["peak_memory_mb"])


def test_probe_records_memory_of_the_accelerator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's memory was compared with a trainer's memory on a GPU."""
    assert recorded(tmp_path) > 50, "of the process, which has imported PyTorch"
    clock = Probe(tmp_path, 0)._clock
    StandIn(monkeypatch).peak = 3 * 2**20
    monkeypatch.setattr("hvd_trainer.tools.runner.step_probe.Clock", lambda device: clock)
    assert recorded(tmp_path) == 3
