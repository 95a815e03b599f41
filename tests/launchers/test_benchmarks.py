"""The benchmarks run; what they measure is not tested."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from launchers import launch
from torchvision.transforms import v2

from benchmarks.contestants import CONTESTANTS, TOKENS
from benchmarks.growth import Case, Figures, cases, run, table
from benchmarks.raw import files
from benchmarks.run import REPOSITORY
from benchmarks.run import run as measure
from benchmarks.to_target import Outcome, report

pytestmark = pytest.mark.warm


@pytest.mark.parametrize("contestant", CONTESTANTS, ids=lambda c: f"{c.job.name}-{c.name}")
def test_every_contestant_can_be_imported(contestant) -> None:
    first, module, *_ = contestant.arguments.split()
    assert (REPOSITORY / first).is_file() if first != "-m" else importlib.util.find_spec(module) is not None
    names = {other.name for other in CONTESTANTS if other.job is contestant.job}
    assert {contestant.job.baseline, contestant.job.floor, *contestant.against} <= names


@pytest.mark.nightly
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


def test_contestant_that_is_not_installed_is_left_out() -> None:
    peer = next(one for one in CONTESTANTS if one.needs is not None)
    assert not replace(peer, needs="no_such_package").is_here
    assert replace(peer, needs="torch").is_here


def test_growth_is_the_difference_within_a_round() -> None:
    """A slow second round, where both loops take longer, does not change the difference."""
    ours = Case("tensors", 2, 10, 10**5, "ddp", "trainer")
    speeds = {"trainer": (1.2, 3.1), "hand": (1.0, 3.0)}
    measured = {
        ours._replace(loop=loop): [Figures(step, 5.0, 400.0) for step in steps] for loop, steps in speeds.items()
    }
    (*_, row) = table(measured).splitlines()
    assert row == "| 10 tensors | ddp | 2.000 | 2.150 | +0.150 | 5.0, 5.0 | 400, 400 |"
    assert {case.size for case in cases(["ranks"])} == {1, 2, 4, 8}


def test_growth_leaves_out_rounds_that_lack_one_of_both() -> None:
    """The second round of one loop was compared with the first of the other."""
    trainer = Case("ranks", 2, 20, 100, "ddp", "trainer")
    fast, slow = Figures(1.0, 2.0, 3.0), Figures(10.0, 2.0, 3.0)
    said = table({trainer: [None, slow], trainer._replace(loop="hand"): [fast, slow]})
    assert "| 10.000 | 10.000 | +0.000 |" in said
    assert "| failed |" in table({trainer: [None], trainer._replace(loop="hand"): [fast]})


def test_to_target_runs_over_seeds(tmp_path: Path) -> None:
    """Options behind -- override the recipe's."""
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


def test_to_target_counts_missed_targets() -> None:
    reached = Outcome(1.0, 0.5, 2, 100, 0.991, True)
    said = report("test_accuracy=0.99", [reached, reached._replace(seconds=2.0, figure=0.981, reached=False)])
    assert "| seconds after the first step | 1.5 | 1.5 | 1 | 2 | 0.5 |" in said
    assert said.endswith("1 of 2 seeds reached test_accuracy=0.99.")


@pytest.mark.long
def test_growth_measures_a_training(tmp_path: Path) -> None:
    figures = run(Case("samples", 2, 10, 10**4, "ddp", "trainer"), tmp_path, 100)
    assert figures is not None
    assert 0 < figures.step_ms < 1000
    assert 0 < figures.first_step_s < 60
    assert figures.peak_mb > 100


def test_files_are_made_and_read_in_both_forms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that are normalised as a batch, or image by image, are the same floats."""
    for name, value in {"NUM_IMAGES": 20, "NUM_DIFFERENT": 2, "NUM_SHARDS": 2, "SHARD_TOKENS": 1100}.items():
        monkeypatch.setattr(files, name, value)
    for kind in ("images", "tokens", "images"):
        files.make(tmp_path, kind)
    images = files.data_set(tmp_path, "images", pixels=True)
    pixels, label = images[19]
    assert (pixels.shape, pixels.dtype, label) == ((3, 224, 224), torch.uint8, 9)
    each = v2.Compose([v2.ToDtype(torch.float32, True), v2.Normalize(files.MEAN, files.STD)])(pixels)
    # Two roundings in another order, of numbers up to 2.6.
    torch.testing.assert_close(files.normalise(pixels[None])[0], each, rtol=0, atol=1e-5)
    assert files.data_set(tmp_path, "images")[0][0].dtype == torch.float32
    tokens = files.data_set(tmp_path, "tokens")
    assert len(tokens) == 4
    rows = tokens.__getitems__([0, 3])
    shard = np.load(tmp_path / "tokens/1.npy").astype(np.int64)
    assert rows[1][0].tolist() == shard[512:1024].tolist()
    assert rows[1][1] == shard[1024] % 10


@pytest.mark.long
@pytest.mark.parametrize("name", ["DataLoader", "hvd_trainer ddp"])
def test_training_on_files_is_measured(tmp_path: Path, name: str) -> None:
    contestant = next(one for one in CONTESTANTS if (one.job.name, one.name) == (TOKENS.name, name))
    files.make(tmp_path, "tokens")
    measured = measure(contestant, 2, tmp_path, limit_s=100)
    assert measured.images_per_s > 0
    assert measured.peak_mb > 100
