"""The benchmarks run; what they measure is not tested."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from launchers import launch, requires
from torchvision.transforms import v2

from benchmarks import slow_link
from benchmarks.contestants import CONTESTANTS, TOKENS
from benchmarks.growth import Case, Figures, cases, run, table
from benchmarks.raw import files
from benchmarks.run import REPOSITORY
from benchmarks.run import run as measure
from benchmarks.slow_link_cases import FAST, Link, Plan
from benchmarks.slow_link_results import Measured, as_points, markdown
from benchmarks.to_target import Outcome, report
from hvd_trainer.tools.runner.records import RunRecord, append_run

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


SLOW = Link(100.0, 20.0)
BOTH = Plan((2,), 1, (SLOW,), ("horovod", "ddp"), ("none", "powersgd"), (1,), 64, 32, 960, 5, "digits")


def runs_of(plan: Plan, rounds: int) -> list[RunRecord]:
    """Return runs with steps of 10 ms, 20 over the fast link, 300 over the slow one, and 1 more in each round."""
    runs = []
    for number in range(rounds):
        for case in plan.cases(fit=False):
            step_ms = 10.0 + number if not case.exchange else (20.0 if case.link == FAST else 300.0) + number
            losses = {"train_loss": 0.5, "test_loss": 0.25 + 0.01 * number}
            figures = {"step_ms": step_ms, "steps": 15, "samples": 960, **losses}
            runs.append(RunRecord(case._asdict(), number + 1, "done", 1.0, figures=figures))
    return runs


def test_slow_link_table_compares_slow_and_fast() -> None:
    """An epoch's time on the slow link is that of its steps; what an engine lacks has a row that says so."""
    said = markdown(Measured(runs_of(BOTH, 3), 3, BOTH.steps), BOTH, BOTH.cases(fit=False), "here")
    rows = [line for line in said.splitlines() if line.startswith("| 2 |")]
    assert len(rows) == 4
    assert rows[1] == "| 2 | horovod | 1 | powersgd | not on this engine |  |  |  |  |  |  |"
    times = "11.0 | 21.0 (20.0 to 22.0) | 301.0 (300.0 to 302.0) | 0.3 | 4.5"
    assert rows[3] == f"| 2 | ddp | 1 | powersgd | {times} | 0.5000 ± 0.0000 | 0.2600 ± 0.0100 |"


def test_slow_link_points_have_all_fields() -> None:
    """Points have the fields that a model of costs needs; failed runs are left out."""
    runs = [run for run in runs_of(BOTH, 2) if run.identity["backend"] == "ddp"]
    points = as_points(Measured(runs, 2, BOTH.steps), BOTH.cases(fit=True), "here")
    assert (points["format"], points["machine"]) == (1, "here")
    assert [(point["compression"], point["link_mbit"]) for point in points["points"]] == [
        *(("none", None), ("none", 100.0), ("powersgd", None), ("powersgd", 100.0)),
    ]
    assert points["points"][3] == {
        **{"backend": "ddp", "hosts": 2, "ranks_per_host": 1, "link_mbit": 100.0, "delay_ms": 20.0},
        **{"compression": "powersgd", "accumulation": 1, "batch_size": 32},
        **{"gradient_mb": 4 * (784 * 64 + 64 + 64 * 64 + 64 + 64 * 10 + 10) / 2**20, "num_tensors": 6},
        **{"step_ms": [300.0, 301.0], "compute_ms": 10.5, "loss": 0.255, "samples": 960},
    }


def test_slow_link_fit_cases_vary_links_sizes_and_hosts() -> None:
    further = set(BOTH.cases(fit=True)) - set(BOTH.cases(fit=False))
    seen = {(case.hosts, case.width, case.link) for case in further if case.exchange and case.backend == "ddp"}
    middle, others = Link(200.0, 5.0), (Link(1000.0, 1.0), Link(200.0, 5.0), Link(100.0, 0.0))
    assert seen == {
        *((2, 64, link) for link in others),
        *((2, 32, link) for link in (FAST, SLOW, *others)),
        *((3, 64, link) for link in (FAST, SLOW, middle)),
    }
    assert all(case.alone(BOTH.steps) in BOTH.cases(fit=True) for case in further)


NARROW = ("--width", "64", "--batch-size", "32", "--samples", "960", "--steps", "5", "--accumulations", "1")


def test_slow_link_resumes_from_recorded_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the right to make hosts, recorded runs are printed as a table, and a missing run is an error."""
    monkeypatch.setattr(slow_link, "missing", lambda: "they need root")
    output = tmp_path / "table"
    output.mkdir()
    for done in runs_of(BOTH, 1):
        append_run(output, done)
    words = [*NARROW, "--compressions", "none", "powersgd", "--output", str(output)]
    assert slow_link.main([*words, "--rounds", "1"]) == 0
    assert (tmp_path / "table.md").read_text() == capsys.readouterr().out
    assert len(json.loads((tmp_path / "table.json").read_text())["points"]) == 6
    assert slow_link.main([*words, "--rounds", "2"]) == 2
    assert capsys.readouterr().err == "error: Hosts of namespaces cannot be made here: they need root\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--links", "100"], "argument --links"),
        (["--links", "0/20"], "argument --links"),
        (["--hosts", "1", "--rounds", "0"], "--hosts must be 2 or more, not 1; --rounds must be 1 or more, not 0"),
    ],
)
def test_slow_link_refuses_invalid_arguments(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        slow_link.main(words)
    assert message in capsys.readouterr().err


def test_slow_link_refuses_data_below_tmp(capsys: pytest.CaptureFixture[str]) -> None:
    assert slow_link.main(["--data-dir", "/tmp/mnist"]) == 2
    assert "each host has a /tmp of its own" in capsys.readouterr().err


@pytest.mark.nightly
@requires("hosts")
def test_slow_link_measures_trainings(tmp_path: Path) -> None:
    words = ["-m", "benchmarks.slow_link", *NARROW, "--rounds", "1", "--output", str(tmp_path / "table")]
    result = launch("python", 1, [*words, "--backends", "ddp", "--compressions", "none"], timeout_s=240)
    assert "| 2 | ddp | 1 | none |" in result.stdout
    assert (tmp_path / "table.md").read_text() == result.stdout
    fast, slow = json.loads((tmp_path / "table.json").read_text())["points"]
    assert (fast["link_mbit"], slow["link_mbit"]) == (None, 100.0)
    # Twice through the cable at the least.
    assert slow["step_ms"][0] >= 40
    assert fast["loss"] == slow["loss"] > 0
