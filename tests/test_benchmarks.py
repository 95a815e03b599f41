"""The benchmarks run, so that they are there when somebody wants to measure; what they measure is not tested."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest
from launchers import launch

from benchmarks.contestants import CONTESTANTS
from benchmarks.growth import Case, Figures, cases, run, table
from benchmarks.to_target import Outcome, report


@pytest.mark.parametrize("contestant", CONTESTANTS, ids=lambda c: f"{c.job.name}-{c.name}")
def test_every_contestant_is_there(contestant) -> None:
    first, module, *_ = contestant.arguments.split()
    assert first == "-m"
    assert importlib.util.find_spec(module) is not None
    names = {other.name for other in CONTESTANTS if other.job is contestant.job}
    assert {contestant.job.baseline, contestant.job.floor, *contestant.against} <= names


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


def test_a_peer_that_is_not_installed_is_left_out() -> None:
    peer = next(one for one in CONTESTANTS if one.needs is not None)
    assert not replace(peer, needs="no_such_package").is_here
    assert replace(peer, needs="torch").is_here


def test_growth_is_the_difference_within_a_round() -> None:
    """A slow second round, where both take longer, says nothing."""
    ours = Case("tensors", 2, 10, 10**5, "ddp", "trainer")
    speeds = {"trainer": (1.2, 3.1), "hand": (1.0, 3.0)}
    measured = {
        ours._replace(loop=loop): [Figures(step, 5.0, 400.0) for step in steps] for loop, steps in speeds.items()
    }
    (*_, row) = table(measured).splitlines()
    assert row == "| 10 tensors | ddp | 2.00 | 2.15 | +0.15 | 5.0, 5.0 | 400, 400 |"
    assert {case.size for case in cases(["ranks"])} == {1, 2, 4, 8}


def test_growth_leaves_out_rounds_that_lack_one_of_both() -> None:
    """Once the second round of one stood beside the first of the other."""
    trainer = Case("ranks", 2, 20, 100, "ddp", "trainer")
    fast, slow = Figures(1.0, 2.0, 3.0), Figures(10.0, 2.0, 3.0)
    said = table({trainer: [None, slow], trainer._replace(loop="hand"): [fast, slow]})
    assert "| 10.00 | 10.00 | +0.00 |" in said
    assert "| failed |" in table({trainer: [None], trainer._replace(loop="hand"): [fast]})


def test_the_way_to_a_target_over_seeds(tmp_path: Path) -> None:
    """The options behind -- win over the recipe's."""
    options = ("--dataset", "digits", "--epochs", "9", "--batch-size", "64")
    result = launch(
        "python",
        1,
        [
            *("-m", "benchmarks.to_target", "--data-dir", str(tmp_path), "--seeds", "1"),
            *("--until", "test_accuracy=0.9", "--", *options),
        ],
    )
    assert "| seconds after the first step |" in result.stdout
    assert "1 of 1 seeds reached test_accuracy=0.9." in result.stdout


def test_a_target_that_is_missed_is_counted() -> None:
    reached = Outcome(1.0, 0.5, 2, 100, 0.991, True)
    said = report("test_accuracy=0.99", [reached, reached._replace(seconds=2.0, figure=0.981, reached=False)])
    assert "| seconds after the first step | 1.5 | 1.5 | 1 | 2 | 0.5 |" in said
    assert said.endswith("1 of 2 seeds reached test_accuracy=0.99.")


@pytest.mark.long
def test_a_training_of_a_grown_size_is_measured(tmp_path: Path) -> None:
    figures = run(Case("samples", 2, 10, 10**4, "ddp", "trainer"), tmp_path, 100)
    assert figures is not None
    assert 0 < figures.step_ms < 1000
    assert 0 < figures.first_step_s < 60
    assert figures.peak_mb > 100
