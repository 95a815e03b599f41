"""`grid`: what it plans and predicts, what it refuses, and that a killed one goes on where it stopped."""

from __future__ import annotations

import csv
import io
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from launchers import Job, launch, start
from matplotlib.figure import Figure

from hvd_trainer.errors import OptionError
from hvd_trainer.tools.grid import cli, heat_map, report
from hvd_trainer.tools.grid.configurations import ABSENT, Axis, Configuration, configurations, in_rounds, read_axis
from hvd_trainer.tools.grid.job_options import find_job
from hvd_trainer.tools.grid.prediction import predict, why_off
from hvd_trainer.tools.grid.results import read_figures
from hvd_trainer.tools.grid.rows import Row, make_rows
from hvd_trainer.tools.runner import formats
from hvd_trainer.tools.runner.runs import Run, append_run, locked_folder, read_runs, run_once, why_it_failed

SIZED = "synthetic_reviews"


def axes_of(**values: str) -> list[Axis]:
    return [read_axis(name, text) for name, text in {"ranks": "1", "threads": "1", **values}.items()]


def plan(*further: str, job: str = "mnist", steps: int = 10, **values: str) -> list[Configuration]:
    return configurations(find_job(job), axes_of(**values), further, steps)


def only(*further: str, job: str = "mnist", **values: str) -> Configuration:
    (configuration,) = plan(*further, job=job, **values)
    return configuration


# Planning.


def test_the_product_in_order() -> None:
    made = plan(ranks="1,2", chunks="1,4", backend="ddp,horovod")
    assert [tuple(c.values.values()) for c in made] == [
        (ranks, "1", chunks, backend) for ranks in "12" for chunks in "14" for backend in ("ddp", "horovod")
    ]
    assert all(c.reason is None for c in made)
    assert made[-1].ranks == 2
    assert made[-1].options.parallel.chunks == 4
    assert made[-1].arguments[-2:] == ("--chunks=4", "--backend=horovod")
    assert made[-1].named(axes_of(ranks="1,2", chunks="1,4", backend="ddp")) == "ranks 2, chunks 4"


@pytest.mark.parametrize(
    ("further", "values", "reason"),
    [
        ((), {"ranks": "3", "stages": "2"}, "--stages 2 does not divide the 3 ranks"),
        ((), {"ranks": "2", "stages": "2", "chunks": "1"}, "--schedule 1f1b keeps 2 stages busy only"),
        ((), {"ranks": "2", "chunks": "64", "batch_size": "32"}, "--chunks 64 cuts --batch-size 32"),
        ((), {"ranks": "4", "stages": "4", "batch_size": "2"}, "4 chunks cut a batch of 2 into less than one"),
        (("--global-batch-size", "6"), {"ranks": "2", "chunks": "4"}, "4 chunks cut a batch of 3 into less"),
        (("--global-batch-size", "5"), {"ranks": "2"}, "--global-batch-size 5 does not divide"),
        ((), {"ranks": "2", "stages": "2", "devices_per_rank": "2"}, "leave one out"),
        (("--reproducible", "2"), {"ranks": "2", "chunks": "2"}, "--chunks and --reproducible"),
        ((), {"backend": "ddp", "adasum": "true"}, "--adasum with --backend ddp"),
        ((), {"backend": "horovod", "compression": "powersgd"}, "only DDP has it"),
        ((), {"accumulate": "0"}, "--accumulate must be 1 or more"),
    ],
)
def test_impossible_ones_have_a_reason(further: Sequence[str], values: dict[str, str], reason: str) -> None:
    found = only(*further, **values).reason
    assert found is not None
    assert reason in found


def test_axes_without_a_say_make_no_configurations() -> None:
    """One stage has no schedule: it runs once, and is possible although others have one."""
    made = plan(ranks="2", stages="1,2", schedule="gpipe,1f1b,zero-bubble")
    assert [(c.values["stages"], c.values["schedule"]) for c in made] == [
        ("1", ABSENT),
        *(("2", name) for name in ("gpipe", "1f1b", "zero-bubble")),
    ]
    assert all(c.reason is None for c in made)
    assert not any("schedule" in word for word in made[0].arguments)


def test_the_same_options_are_the_same_configuration() -> None:
    """However they were typed: so that other axes in the same folder find what was measured."""
    plain = only(ranks="2", batch_size="128", precision="fp32")
    assert plain.key == only("--batch-size", "128", ranks="2").key == only(ranks="2").key
    assert plain.key != only(ranks="2", precision="bf16").key
    assert plain.key != only(ranks="2", job="imdb").key
    assert plain.key != only(ranks="2", threads="2").key
    assert json.loads(plain.key) == plain.identity


def test_data_of_any_size_last_as_many_steps() -> None:
    def reviews(*further: str, **values: str) -> tuple[int, int]:
        made = only(*further, job="imdb", **values)
        (word,) = [word for word in made.arguments if word.startswith("--synthetic-reviews")]
        return int(word.partition("=")[2]), made.options.data.synthetic_reviews  # type: ignore[attr-defined]

    assert reviews(ranks="2", batch_size="32") == (640, 640)
    assert reviews(ranks="2", stages="2", batch_size="32") == (320, 320)
    assert reviews(ranks="2", batch_size="8", accumulate="4") == (640, 640)
    assert reviews("--synthetic-reviews=99", ranks="2") == (99, 99)


def test_rounds_go_forwards_and_backwards() -> None:
    made = plan(ranks="1,2,4")
    order = [(number, c.ranks) for number, c in in_rounds(made, 3)]
    assert order == [(1, 1), (1, 2), (1, 4), (2, 4), (2, 2), (2, 1), (3, 1), (3, 2), (3, 4)]


# Prediction.


def test_a_step_in_stages_is_predicted_from_one_rank() -> None:
    """The example of the module: 100 ms, halved, and a fifth of it waiting."""
    made = plan(ranks="1,2", stages="1,2", chunks="1,4", batch_size="32", schedule="gpipe")
    alone, cut = made[0], made[1]
    staged = made[-1]
    assert (staged.parts, staged.chunks, staged.copies, staged.bubble) == (2, 4, 1, 0.2)
    for base in (alone, cut):
        found = predict(staged, {base.key: 0.1}, made, None)
        assert found is not None
        assert found.base is base
        assert found.step_s == pytest.approx(0.0625)
    both = predict(staged, {alone.key: 0.1, cut.key: 0.12}, made, None)
    assert both is not None
    assert both.base is cut  # whose chunks are as small


def test_what_a_prediction_starts_from() -> None:
    made = plan(ranks="1,2,4", stages="1,2", chunks="1,2", batch_size="32,64", schedule="gpipe")

    def at(ranks: int, stages: int, chunks: int, batch: int = 32) -> Configuration:
        wanted = {"ranks": ranks, "stages": stages, "chunks": chunks, "batch_size": batch}
        return next(c for c in made if all(c.values[name] == str(value) for name, value in wanted.items()))

    def predicted(wanted: Configuration, *measured: Configuration) -> tuple[float, Configuration] | None:
        return predict(wanted, {base.key: 1.0 + number for number, base in enumerate(measured)}, made, None)

    # As many copies of the model exchange as many gradients.
    assert predicted(at(4, 2, 2), at(1, 1, 1), at(2, 1, 1)) == (pytest.approx(2 * 0.75), at(2, 1, 1))
    # More ranks do more at the same time.
    assert predicted(at(4, 1, 1), at(1, 1, 1)) == (1, at(1, 1, 1))
    # In a naive pipeline one stage works at a time.
    assert predicted(at(2, 2, 1), at(1, 1, 1)) == (pytest.approx(1), at(1, 1, 1))
    assert predicted(at(2, 2, 2), at(2, 2, 1)) == (pytest.approx(0.75), at(2, 2, 1))
    # Neither itself, nor another batch.
    assert predicted(at(1, 1, 1), at(1, 1, 1), at(1, 1, 1, 64)) is None
    assert predicted(at(2, 2, 2), at(1, 1, 1, 64)) is None


def test_other_options_are_not_compared_and_the_number_of_samples_is_none() -> None:
    made = plan(job="imdb", ranks="1,2", precision="fp32,bf16", batch_size="32")
    one, one_bf16, two, _ = made
    assert one.identity[SIZED] != two.identity[SIZED]
    found = predict(two, {one.key: 0.5, one_bf16.key: 0.25}, made, SIZED)
    assert found == (0.5, one)


# What the runs say.


def run_of(configuration: Configuration, number: int = 1, rate: float = 100.0, **figures: float) -> Run:
    given = {"samples_per_s": rate, "global_batch_size": 32.0, "train_loss": 0.5, **figures}
    return Run(configuration.identity, number, "done", 1.0, figures=given)


def test_rows_have_medians_and_the_first_ones_loss_beside() -> None:
    made = plan(ranks="1,2", batch_size="16,32")
    first, other, third, open_one = made
    runs = [run_of(first, number, rate) for number, rate in enumerate((90, 110, 100), 1)]
    runs += [run_of(other, train_loss=0.51), run_of(third, global_batch_size=64.0, train_loss=9.0)]
    runs += [Run(third.identity, 2, "killed", 9.0, "had not ended")]
    rows = make_rows(made, runs, None)
    assert [row.state for row in rows] == ["done", "done", "done", "not run"]
    figures = rows[0].figures
    assert (figures["runs"], figures["samples_per_s"], figures["lowest"], figures["highest"]) == (3, 100, 90, 110)
    assert figures["step_s"] == 0.32
    assert figures["loss_to_first"] == 0
    assert rows[1].figures["loss_to_first"] == pytest.approx(0.02)
    assert rows[2].figures["loss_to_first"] == 0  # another size of steps: another training
    assert rows[2].note == "killed in round 2: had not ended"
    assert rows[3].configuration is open_one


def test_the_last_word_on_a_round_counts() -> None:
    made = plan(ranks="1,2,3", stages="1,2")
    failed = Run(made[0].identity, 1, "failed", 1.0, "out of memory")
    (row, *_) = make_rows(made, [failed], None)
    assert (row.state, row.note) == ("failed", "out of memory")
    (row, *others) = make_rows(made, [failed, run_of(made[0])], None)
    assert (row.state, row.note) == ("done", "")
    assert [other.state for other in others] == ["impossible", "not run", "not run", "not run", "impossible"]


# The record.


def test_a_torn_line_is_no_run_and_spoils_no_other(tmp_path: Path) -> None:
    made = only()
    append_run(tmp_path, run_of(made, 1))
    file = tmp_path / "runs.jsonl"
    file.write_bytes(file.read_bytes() + file.read_bytes()[:40])
    append_run(tmp_path, run_of(made, 2))
    assert [run.round for run in read_runs(tmp_path)] == [1, 2]
    assert {run.key for run in read_runs(tmp_path)} == {made.key}
    assert read_runs(tmp_path / "elsewhere") == []


def test_a_run_that_takes_too_long_is_killed_with_all_it_started(tmp_path: Path) -> None:
    """A launcher's ranks have sessions of their own."""
    code = (
        "import subprocess, time; "
        "child = subprocess.Popen(['sleep', '60'], start_new_session=True); print(child.pid, flush=True); "
        "time.sleep(60)"
    )
    ended = run_once(
        [sys.executable, "-c", code], tmp_path, {"job": "sleep"}, 1, threads=1, limit_s=2.0, read=read_figures
    )
    assert (ended.state, ended.note) == ("killed", "had not ended after 2 s (--timeout-s)")
    child = int((tmp_path / ended.output).read_text())
    status = Path(f"/proc/{child}/status")
    assert not status.exists() or "zombie" in status.read_text()
    assert not (tmp_path / "running").exists()


def test_what_is_run_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What failed is not, what was killed is when the grid is started again, and what is done never is."""
    made = plan(ranks="1,2,4,8")
    what = cli.Grid(find_job("mnist"), axes_of(ranks="1,2,4,8"), made, "", tmp_path)
    ends = {1: "done", 2: "failed", 4: "killed", 8: "done"}
    started: list[tuple[int, int]] = []

    def start_nothing(what: cli.Grid, configuration: Configuration, number: int, limit_s: float) -> Run:
        started.append((number, configuration.ranks))
        return Run(configuration.identity, number, ends[configuration.ranks], 1.0)

    def again(**how: Any) -> list[tuple[int, int]]:
        started.clear()
        cli.measure(what, cli.Options(cli.Axes(), **how))
        return started

    monkeypatch.setattr(cli, "start", start_nothing)
    assert again(rounds=2) == [(1, 1), (1, 2), (1, 4), (1, 8), (2, 8), (2, 1)]
    ends[4] = "done"
    assert again(rounds=2) == [(1, 4), (2, 4)]
    assert again(rounds=2) == []
    assert again(rounds=3) == [(3, 1), (3, 4), (3, 8)]
    assert again(rounds=1, retry_failed=True) == [(1, 2)]
    ends[2] = "done"
    assert again(rounds=1, retry_failed=True) == [(1, 2)]
    assert again(rounds=2) == [(2, 2)]


@pytest.mark.parametrize(
    ("told", "said", "reason"),
    [
        ("--stages 9 is too many\nType less", "", "--stages 9 is too many"),
        (
            "failure: rank 0\nTraceback (most recent call last):\n  File x\nMemoryError: much\n",
            "",
            "MemoryError: much",
        ),
        (None, "banner\n[rank 0] error: No such data\nW1122 torchrun speaks\n", "No such data"),
        (
            None,
            "error: Traceback (most recent call last):\n  File x\n    line\nKeyError: 1\n\nE1122",
            "KeyError: 1",
        ),
        (None, "nothing of use", "exit code 3"),
    ],
)
def test_the_reason_is_one_line(told: str | None, said: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "output").write_text(said)
    if told is not None:
        (tmp_path / "error.json").write_text(json.dumps({"message": {"message": told}}))
    assert why_it_failed(tmp_path, 3) == reason


# Reports.

TWO_AXES = axes_of(ranks="1,4", stages="1,2")


def rows_of_a_grid() -> tuple[list[Row], list[Axis]]:
    axes = axes_of(ranks="1,2", stages="1,2", chunks="2,4", batch_size="16,32")
    made = configurations(find_job("mnist"), axes, (), 10)
    runs = [run_of(c, rate=1000.0 + 7 * n, bubble=0.4) for n, c in enumerate(made) if c.reason is None]
    return make_rows(made, [*runs[:-1], Run(made[-1].identity, 1, "failed", 1.0, "out of memory")], None), axes


def test_the_table_names_what_has_no_figures() -> None:
    rows, axes = rows_of_a_grid()
    out = io.StringIO()
    report.print_table(rows, axes, out)
    report.print_differences(rows, axes, out)
    text = out.getvalue()
    assert re.search(r"2 +2 +2 +16 +1,084 .* 40\.0% +33\.3%", text)
    assert re.search(r"1 +2 +2 +16 +- .* impossible \(1\)", text)
    assert re.search(r"failed \(2\)", text)
    assert re.search(r"^\(1\) --stages 2 does not divide the 1 rank", text, re.MULTILINE)
    assert re.search(r"^\(2\) out of memory$", text, re.MULTILINE)
    assert "by more than 10% in " in text
    assert re.search(
        r"^  ranks 2, stages 2, chunks 4, .* ms \(\+\d+%\) from ranks 1, stages 1.*\n"
        r"    stages waited, sent and received for 40% of it and not 20%: \+33%; all else: \+\d+%$",
        text,
        re.MULTILINE,
    )


def test_a_long_heading_stays_in_the_picture() -> None:
    """It was cut at both ends."""
    figure = Figure(figsize=(4.5, 2.6))
    heat_map.set_heading(figure, "imdb --d-model 512 --d-hid 2048 --sequence-length 64, batch size 16, " * 3)
    place = figure.texts[0].get_window_extent()
    assert place.x0 > 0
    assert place.x1 < figure.bbox.width
    assert figure.get_figheight() > 2.6


def test_what_a_prediction_did_not_know() -> None:
    """Twice as long as predicted: waiting alone makes 0.8 / 0.5 of it."""
    made = {c.named(TWO_AXES): c for c in configurations(find_job("mnist"), TWO_AXES, (), 10)}
    one, four = made["ranks 1, stages 1"], made["ranks 4, stages 2"]
    figures = {"off": 1.0, "bubble": 0.5, "bubble_formula": 0.2}
    assert why_off(four, one, figures, 2) == [
        "stages waited, sent and received for 50% of it and not 20%: +60%; all else: +25%",
        "4 threads on 2 cores",
        "2 copies of the model work at once, and exchange gradients",
        "chunks of 64 samples, one after the other",
    ]
    assert why_off(one, one, {"off": 1.0}, None) == []


def test_pictures_have_a_panel_for_ranks_and_stages(tmp_path: Path) -> None:
    rows, axes = rows_of_a_grid()
    across, up = heat_map.inner_axes(axes)
    assert (across.name, up.name) == ("chunks", "batch_size")
    panels = list(heat_map.panels_of(rows, axes, across, up))
    assert [panel.title for panel in panels] == [f"ranks {r}, stages {s}" for r in (1, 2) for s in (1, 2)]
    assert [len(panel.rows) for panel in panels] == [4] * 4
    files = heat_map.draw(rows, axes, heat_map.QUANTITIES[0], "a heading", tmp_path)
    assert [file.name for file in files] == ["throughput.png", "throughput.svg"]
    assert files[0].read_bytes().startswith(b"\x89PNG")
    drawn = files[1].read_text()
    for row in rows:
        assert "samples_per_s" not in row.figures or f">{row.figures['samples_per_s']:,.0f}<" in drawn
    for text in ("a heading", "impossible", "failed", "batch size", "throughput, samples/s"):
        assert f">{text}<" in drawn
    assert "<pattern" in drawn  # the hatching
    assert heat_map.draw(rows, axes, heat_map.QUANTITIES[1], "no figures", tmp_path) == []


def test_pictures_of_other_axes() -> None:
    """The memory of a model: no chunks, no batch sizes."""
    axes = axes_of(ranks="2", precision="fp32,bf16", shard="none,optimizer,full", backend="ddp,horovod")
    across, up = heat_map.inner_axes(axes)
    assert (across.name, up.name) == ("shard", "precision")
    across, up = heat_map.inner_axes(axes_of(ranks="1,2"))
    assert (across.name, up.name) == ("ranks", "")


# Mistakes.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--job", "nothing"], r"there is no module nothing\. Type --job imdb or --job mnist"),
        (["--job", "hvd_trainer.jobs.models"], r"defines 0 classes of options"),
        (["--job", "mnist", "--ranks", "0,1"], r"--ranks 0,1: give whole numbers from 1 on"),
        (["--job", "mnist", "--chunks", "1,,2"], r"--chunks 1,,2: give values with commas"),
        (
            ["--job", "mnist", "--chunks", "two"],
            r"does not take --chunks two\. Its options: python -m hvd_trainer\.",
        ),
        (["--job", "mnist", "--precision", "fp99"], r"--precision fp99 \(there are: fp32, bf16, fp16\)"),
        (["--job", "mnist", "--axis", "optimiser=sgd"], r"no option --optimiser .* Did you mean --optimizer\?"),
        (["--job", "mnist", "--axis", "seed"], r"--axis seed: type the option's name and its values"),
        (["--job", "mnist", "--axis", "compile=maybe"], r"--compile is a switch: type --axis compile=true,false"),
        (["--job", "mnist", "--chunks", "1", "--axis", "chunks=2"], r"--chunks is given twice"),
        (["--job", "mnist", "--chunks", "1", "--", "--chunks", "2"], r"--chunks is an axis, and stands behind --"),
        (["--job", "mnist", "--", "--log-dir", "x"], r"leave out --log-dir"),
        (["--job", "mnist", "--", "--nothing"], r"The job mnist does not take --nothing"),
        (
            ["--rounds", "-1", "--steps", "0", "--timeout-s", "0"],
            r"--rounds must .*; --steps must .*; --timeout-s",
        ),
    ],
)
def test_mistakes_are_said_before_anything_runs(arguments: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=message):
        cli.main(["--out", str(tmp_path / "grid"), *arguments])
    assert not (tmp_path / "grid").exists()


def test_a_missing_package_is_named_before_anything_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(formats, "NEEDED", ("rich", "no_such_package"))
    with pytest.raises(OptionError, match=r"no_such_package.*Type: pip install 'hvd_trainer\[tools\]'"):
        cli.main(["--job", "mnist", "--out", str(tmp_path / "grid")])


def test_a_folder_is_one_grids_alone(tmp_path: Path) -> None:
    code = (
        "import fcntl, sys; lock = open(sys.argv[1], 'w'); fcntl.lockf(lock, fcntl.LOCK_EX); "
        "print('locked', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(OptionError, match="another one is using it"), locked_folder(tmp_path):
            pass
        other.communicate()
    with locked_folder(tmp_path):
        pass
    (tmp_path / "file").touch()
    with pytest.raises(OptionError, match="cannot be written to"), locked_folder(tmp_path / "file"):
        pass


# The real thing.


def wait_until(what: Callable[[], object], limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def started(job: Job) -> bool:
    """Whether a run of the grid is on its way."""
    with suppress(psutil.NoSuchProcess):
        return any("torch.distributed.run" in process.cmdline() for process in job.processes())
    return False


@pytest.mark.nightly
def test_a_killed_grid_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """Its job lives on when the grid is killed, and must not disturb the next one's."""
    folder = tmp_path / "grid"
    command = [
        *("-m", "hvd_trainer", "grid", "--job", "mnist", "--ranks", "2", "--stages", "1,2", "--chunks", "2,999"),
        *("--rounds", "1", "--out", str(folder), "--", "--model", "mlp"),
    ]
    with start("python", 1, command) as job:
        wait_until((folder / "runs.jsonl").exists)
        wait_until(lambda: started(job))
        job.popen.send_signal(signal.SIGKILL)
        job.popen.wait()
        (first,) = (folder / "runs.jsonl").read_text().splitlines()
        assert job.processes()
        result = launch("python", 1, command)
    assert "4 configurations, 2 of them impossible; 2 runs in 1 round, 1 to do" in result.stdout
    lines = (folder / "runs.jsonl").read_text().splitlines()
    assert lines[0] == first
    runs = [json.loads(line) for line in lines]
    assert [(run["identity"].get("stages", 1), run["state"]) for run in runs] == [(1, "done"), (2, "done")]
    assert runs[1]["figures"].keys() >= {"samples_per_s", "bubble", "peak_memory_mb", "train_loss"}

    with (folder / "grid.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["state"] for row in rows] == ["done", "impossible", "done", "impossible"]
    assert "--chunks 999 cuts --batch-size 128" in rows[1]["note"]
    drawn = (folder / "throughput.svg").read_text()
    for row, run in zip(rows[::2], runs, strict=True):
        assert float(row["samples_per_s"]) == run["figures"]["samples_per_s"]
        assert f">{formats.number(run['figures']['samples_per_s'])}<" in drawn
    assert float(rows[2]["bubble_formula"]) == pytest.approx(1 / 3)
    kept = {path.name for path in folder.iterdir()}
    pictures = {f"{name}.{kind}" for name in ("throughput", "memory") for kind in ("png", "svg")}
    assert kept == {".lock", "runs.jsonl", "grid.csv", *pictures}


def test_ctrl_c_ends_the_running_job(tmp_path: Path) -> None:
    folder = tmp_path / "grid"
    arguments = ["--job", "mnist", "--rounds", "1", "--out", str(folder)]
    with start("python", 1, ["-m", "hvd_trainer", "grid", *arguments]) as job:
        wait_until(lambda: started(job))
        job.popen.send_signal(signal.SIGINT)
        result = job.wait(60)
        job.check_nothing_left()
    assert result.returncode == 130
    assert "not run" in result.stdout
    assert "interrupted: the same command goes on from here" in result.stderr
    assert {path.name for path in folder.iterdir()} == {".lock", "grid.csv"}
