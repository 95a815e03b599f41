"""The benchmarks run, so that they are there when somebody wants to measure; what they measure is not tested."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from launchers import launch

from benchmarks.contestants import CONTESTANTS


@pytest.mark.parametrize("contestant", CONTESTANTS, ids=lambda c: f"{c.job.name}-{c.name}")
def test_every_contestant_is_there(contestant) -> None:
    first, module, *_ = contestant.arguments.split()
    assert first == "-m"
    assert importlib.util.find_spec(module) is not None
    names = {other.name for other in CONTESTANTS if other.job is contestant.job}
    assert {contestant.job.baseline, contestant.job.floor, *contestant.against} <= names


@pytest.mark.long
@pytest.mark.long
def test_one_round_gives_a_table(mnist_dir: Path, tmp_path: Path) -> None:
    result = launch(
        "python",
        1,
        [
            *("-m", "benchmarks", "--only", "hvd_trainer ddp", "--rounds", "1", "--ranks", "2"),
            *("--data-dir", str(mnist_dir), "--output", str(tmp_path / "table")),
        ],
    )
    assert "| MNIST CNN | 2 | hvd_trainer ddp |" in result.stdout
    assert (tmp_path / "table.md").read_text() == result.stdout
    assert json.loads((tmp_path / "table.json").read_text())
