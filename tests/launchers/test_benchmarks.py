"""The benchmarks run; what they measure is not tested."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from compared import RAN
from launchers import launch
from requirements import requires
from torchvision.transforms import v2

from benchmarks import REPOSITORY
from benchmarks.__main__ import prepare_data
from benchmarks.contestants import CONTESTANTS, Contestant
from benchmarks.raw import files
from benchmarks.to_target import Outcome, report
from benchmarks.trials import BenchmarkTrial, conclude
from hvd_trainer.measure.results import TrialResult
from hvd_trainer.measure.trials import RunRecord, TrialRunner

pytestmark = pytest.mark.warm


@pytest.mark.parametrize("contestant", CONTESTANTS, ids=lambda c: f"{c.job.name}-{c.name}")
def test_every_contestant_can_be_imported(contestant) -> None:
    first, module, *_ = contestant.arguments.split()
    assert (REPOSITORY / first).is_file() if first != "-m" else importlib.util.find_spec(module) is not None
    names = {other.name for other in CONTESTANTS if other.job is contestant.job}
    assert {contestant.job.baseline, contestant.job.floor, *contestant.against} <= names


@pytest.mark.long
def test_one_round_gives_a_table(mnist_dir: Path, tmp_path: Path) -> None:
    """The same command again makes no run, and gives the same table."""
    command = [
        *("-m", "benchmarks", "--only", "hvd_trainer ddp", "--rounds", "1", "--ranks", "2"),
        *("--data-dir", str(mnist_dir), "--out", str(tmp_path / "out")),
    ]
    said, again = (launch("python", 1, command).stdout for _ in range(2))
    assert "1/1  round 1, MNIST CNN, hvd_trainer ddp x 2: " in said
    assert again == said[said.index("1 trial measured in 1 round.") :]
    assert "| hvd_trainer ddp | 2 |" in (tmp_path / "out" / "benchmarks.md").read_text()
    (run,) = json.loads((tmp_path / "out" / "benchmarks.json").read_text())["runs"]
    assert run["work"]["steps"] == 235


def test_contestant_that_is_not_installed_is_left_out() -> None:
    peer = next(one for one in CONTESTANTS if one.needs is not None)
    assert not replace(peer, needs="no_such_package").is_here
    assert replace(peer, needs="torch").is_here


def contestant(job: str, name: str) -> Contestant:
    return next(one for one in CONTESTANTS if (one.job.name, one.name) == (job, name))


def test_ratios_are_those_within_a_round(tmp_path: Path) -> None:
    """A slow round of both changes none; one that lacks either, or was made by another command, is left out."""
    steps = {"by hand, ddp": {1: 1.0, 2: 3.0, 3: 1.0, 4: 1.0}, "hvd_trainer, ddp": {1: 1.25, 2: 3.75, 4: 9.0}}
    trials = [BenchmarkTrial.of(contestant("10 tensors", name), 2, tmp_path) for name in steps]
    runs = [
        RunRecord(trial.identity, n, "done", 9.0, figures={"step_p50_s": s / 1000, "first_step_at": 5.0}, go=go)
        for trial, go_of_4 in zip(trials, (1.0, 2.0), strict=True)
        for n, s in steps[trial.contestant.name].items()
        for go in [go_of_4 if n == 4 else 0.0]
    ]
    runs.append(RunRecord(trials[1].identity, 3, "failed", 9.0, "killed by signal 6"))
    made = conclude(TrialResult.collect(trials, runs), {"cores": 2}, ["busy"], 4, RAN)
    assert [verdict.text for verdict in made.ordered] == [
        "10 tensors, hvd_trainer, ddp x 2: failed in round 3: killed by signal 6"
    ]
    hand, ours = made.tables[0].rows
    assert made.tables[0].columns[2:4] == ["step, ms", "to the baseline"], "samples are not known"
    assert hand[:5] == ["by hand, ddp", "2", "1", "1.00 (1.00 to 1.00)", "1.00 (1.00 to 1.00)"]
    assert ours[2:6] == ["3.75", "0.80", "0.80", "0.80 by hand, ddp"]


def test_to_target_runs_over_seeds(tmp_path: Path) -> None:
    """Options behind -- override the recipe's."""
    options = ("--dataset", "digits", "--repeat", "1", "--epochs", "9", "--batch-size", "64")
    result = launch(
        "python",
        1,
        [
            *("-m", "benchmarks.to_target", "--data-dir", str(tmp_path), "--seeds", "1"),
            *("--until", "val_accuracy>=0.9", "--", *options),
        ],
    )
    assert "| seconds after the first step |" in result.stdout
    assert "1 of 1 seeds reached val_accuracy>=0.9." in result.stdout


@requires("horovod")
def test_rank_check_times_the_comparison_on_both_engines() -> None:
    result = launch("python", 1, ["-m", "benchmarks.rank_check", "--epochs", "1"])
    assert result.returncode == 0, result.stderr
    assert [line.split(":")[0] for line in result.stdout.splitlines()] == ["ddp", "horovod"]


def test_to_target_counts_missed_targets() -> None:
    reached = Outcome(1.0, 0.5, 2, 100, 0.991, True)
    said = report("val_accuracy>=0.99", [reached, reached._replace(seconds=2.0, figure=0.981, reached=False)])
    assert "| seconds after the first step | 1.5 | 1.5 | 1 | 2 | 0.5 |" in said
    assert said.endswith("1 of 2 seeds reached val_accuracy>=0.99.")


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
@pytest.mark.parametrize(
    ("job", "name"),
    [
        ("tokens in mapped files", "DataLoader"),
        ("tokens in mapped files", "hvd_trainer ddp"),
        ("10,000 samples", "hvd_trainer, ddp"),
    ],
)
def test_contestants_are_measured(tmp_path: Path, job: str, name: str) -> None:
    chosen = contestant(job, name)
    prepare_data([chosen.job], tmp_path)
    run = TrialRunner(tmp_path / "out", limit_s=100).run(BenchmarkTrial.of(chosen, 2, tmp_path))
    assert (run.state, run.note) == ("done", "")
    assert run.figures["work"]["steps"] == chosen.job.steps(2)
    assert 0 < run.figures["step_p50_s"] < 1
    assert run.figures["peak_memory_mb"] > 100
    assert (run.figures.get("samples_per_s", 0) > 0) == (chosen.job.max_steps is None)
