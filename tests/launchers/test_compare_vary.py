"""`compare --vary`: its trials, its predictions, its tables and heat maps, and a comparison that is killed."""

from __future__ import annotations

import csv
import json
import re
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from launchers import Job, launch, requires, start
from matplotlib.figure import Figure

from hvd_trainer.errors import OptionError
from hvd_trainer.tools.compare import cli, heat_map, report
from hvd_trainer.tools.compare.entries import Entry
from hvd_trainer.tools.compare.prediction import Shape, explain, predict
from hvd_trainer.tools.compare.result import Comparison, TrialResult
from hvd_trainer.tools.compare.trials import Trial, axes_of, make_trials
from hvd_trainer.tools.compare.variants import NOT_APPLICABLE, Axis, make_variants, read_axes
from hvd_trainer.tools.runner import formats
from hvd_trainer.tools.runner.runs import RunRecord

MNIST = "hvd_trainer.mnist"
WORK = {"global_batch_size": 32, "steps": 10, "rates": [[0.1, 10]]}


def varied(**values: str) -> list[Axis]:
    return read_axes([f"{name}={text}" for name, text in values.items()])


def trials_of(
    *arguments: str, ranks: str = "1", engines: str = "ddp", module: str = MNIST, threads: int = 1, **values: str
) -> list[Trial]:
    return make_trials(
        [Entry(name, name) for name in engines.split(",")],
        [int(number) for number in ranks.split(",")],
        make_variants(("-m", module, *arguments), varied(**values)),
        threads=threads,
        conditions={"warmup_steps": 2},
    )


def only(*arguments: str, **values: Any) -> Trial:
    (trial,) = trials_of(*arguments, **values)
    return trial


# Trials.


def test_make_trials_yields_the_product_in_order() -> None:
    trials = trials_of(ranks="1,2", engines="ddp,horovod", chunks="1,4")
    assert [tuple(trial.values.values()) for trial in trials] == [
        (engine, ranks, chunks) for ranks in "12" for chunks in "14" for engine in ("ddp", "horovod")
    ]
    assert all(trial.reason is None for trial in trials)
    last = trials[-1]
    assert last.ranks == 2
    assert last.options is not None
    assert (last.options.parallel.chunks, last.options.engine.backend) == (4, "horovod")
    assert last.variant.words == ("-m", MNIST, "--chunks=4")
    assert last.label == "horovod x 2, chunks 4"


@pytest.mark.parametrize(
    ("arguments", "values", "reason"),
    [
        ((), {"ranks": "3", "stages": "2"}, "--stages 2 does not divide the 3 ranks"),
        ((), {"ranks": "2", "stages": "2", "chunks": "1"}, "--schedule 1f1b keeps 2 stages busy only"),
        ((), {"ranks": "2", "chunks": "64", "batch_size": "32"}, "--chunks 64 cuts --batch-size 32"),
        ((), {"ranks": "4", "stages": "4", "batch_size": "2"}, "4 chunks cut a batch of 2 into less than one"),
        (("--global-batch-size", "6"), {"ranks": "2", "chunks": "4"}, "4 chunks cut a batch of 3 into less"),
        (("--global-batch-size", "5"), {"ranks": "2", "seed": "1"}, "--global-batch-size 5 does not divide"),
        ((), {"ranks": "2", "stages": "2", "devices_per_rank": "2"}, "leave one out"),
        (("--reproducible", "2"), {"ranks": "2", "chunks": "2"}, "--chunks and --reproducible"),
        ((), {"adasum": "true"}, "--adasum with --backend ddp"),
        ((), {"engines": "horovod", "compression": "powersgd"}, "only DDP has it"),
        ((), {"accumulate": "0"}, "--accumulate must be 1 or more"),
    ],
)
def test_impossible_trials_have_a_reason(arguments: Sequence[str], values: dict[str, str], reason: str) -> None:
    found = only(*arguments, **values).reason
    assert found is not None
    assert reason in found


def test_options_that_change_nothing_add_no_trials() -> None:
    """One stage has no schedule: it runs once, and is possible although others have one."""
    trials = trials_of(ranks="2", stages="1,2", schedule="gpipe,1f1b,zero-bubble")
    assert [(trial.values["stages"], trial.values["schedule"]) for trial in trials] == [
        ("1", NOT_APPLICABLE),
        *(("2", name) for name in ("gpipe", "1f1b", "zero-bubble")),
    ]
    assert all(trial.reason is None for trial in trials)
    assert not any("schedule" in word for word in trials[0].variant.words)


def test_trial_key_depends_on_options_not_on_typing() -> None:
    """However they were typed: so that other axes in the same folder find what was measured."""
    plain = only(ranks="2", batch_size="128", precision="fp32")
    assert plain.key == only("--batch-size", "128", ranks="2", seed="0").key == only(ranks="2", seed="0").key
    assert plain.key != only(ranks="2", precision="bf16").key
    assert plain.key != only(ranks="2", module="hvd_trainer.imdb", seed="0").key
    assert plain.key != only(ranks="2", threads=2, seed="0").key
    assert json.loads(plain.key) == plain.identity


def test_steps_option_sets_the_length_of_all_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the job's own epochs and the size of its data."""
    found: list[Trial] = []
    monkeypatch.setattr(cli, "measure", lambda trials, *_, **__: found.extend(trials))
    options = ("--steps", "20", "--warmup-steps", "5", "--engines", "ddp", "--vary", "batch-size=8,16")
    cli.main(["--out", str(tmp_path), *options, "--", "-m", MNIST, "--epochs", "1", "--max-steps=7"])
    commands = [" ".join(trial.start(tmp_path).command) for trial in found]
    assert len(commands) == 4
    for command in commands:
        assert "--max-steps 25" in command
        assert "--epochs 1000000" in command
        assert "=7" not in command


OWN_JOB = """
from dataclasses import dataclass
from hvd_trainer import TrainerOptions, run_job

@dataclass(frozen=True)
class Options(TrainerOptions):
    width: int = 8

def main(options):
    raise SystemExit("not to be run")

"""
GUARD = 'if __name__ == "__main__":\n    '


def test_make_variants_reads_options_of_a_script(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(f"{OWN_JOB}{GUARD}run_job(Options, main)\n")
    axes = varied(width="8,16")
    narrow, wide = make_variants([str(script)], axes)
    assert (narrow.identity["options"], wide.identity["options"]) == ({}, {"width": 16})
    script.write_text(f"{OWN_JOB}run_job(Options, main)\n")
    with pytest.raises(OptionError, match="and that would run it: put run_job"):
        make_variants([str(script)], axes)
    script.write_text(f"from hvd_trainer import TrainerOptions, run_job\n{GUARD}run_job(TrainerOptions, print)\n")
    (variant,) = make_variants([str(script)], varied(epochs="2"))
    assert variant.identity["options"] == {"epochs": 2}


# Prediction.


def test_predict_staged_step_from_one_rank() -> None:
    """The example of the module: 100 ms, halved, and a fifth of it waiting."""
    trials = trials_of(ranks="1,2", stages="1,2", chunks="1,4", batch_size="32", schedule="gpipe")
    alone, cut = trials[0], trials[1]
    staged = trials[-1]
    assert Shape.of(staged) == Shape(replicas=1, parts=2, chunks=4, batch_size=32, bubble=0.2)
    for base in (alone, cut):
        found = predict(trials, {base.key: 0.1})[staged.key]
        assert found.base is base
        assert found.step_s == pytest.approx(0.0625)
    both = predict(trials, {alone.key: 0.1, cut.key: 0.12})[staged.key]
    assert both.base is cut  # whose chunks are as small


def test_predict_chooses_the_nearest_base() -> None:
    trials = trials_of(ranks="1,2,4", stages="1,2", chunks="1,2", batch_size="32,64", schedule="gpipe")

    def at(ranks: int, stages: int, chunks: int, batch: int = 32) -> Trial:
        wanted = {"ranks": ranks, "stages": stages, "chunks": chunks, "batch_size": batch}
        return next(t for t in trials if all(t.values[name] == str(value) for name, value in wanted.items()))

    def predicted(wanted: Trial, *measured: Trial) -> tuple[float, Trial] | None:
        found = predict(trials, {base.key: 1.0 + number for number, base in enumerate(measured)})
        return found.get(wanted.key)

    # As many replicas of the model exchange as many gradients.
    assert predicted(at(4, 2, 2), at(1, 1, 1), at(2, 1, 1)) == (pytest.approx(2 * 0.75), at(2, 1, 1))
    # More ranks do more at the same time.
    assert predicted(at(4, 1, 1), at(1, 1, 1)) == (1, at(1, 1, 1))
    # In a naive pipeline one stage works at a time.
    assert predicted(at(2, 2, 1), at(1, 1, 1)) == (pytest.approx(1), at(1, 1, 1))
    assert predicted(at(2, 2, 2), at(2, 2, 1)) == (pytest.approx(0.75), at(2, 2, 1))
    # Neither itself, nor another batch.
    assert predicted(at(1, 1, 1), at(1, 1, 1), at(1, 1, 1, 64)) is None
    assert predicted(at(2, 2, 2), at(1, 1, 1, 64)) is None


def test_predict_needs_a_base_of_the_same_engine_and_options() -> None:
    trials = trials_of(ranks="1,2", engines="ddp,horovod", precision="fp32,bf16", batch_size="32")
    ddp, horovod, ddp_bf16 = trials[:3]
    two = next(trial for trial in trials if trial.label == "ddp x 2, precision fp32")
    found = predict(trials, {ddp.key: 0.5, horovod.key: 0.3, ddp_bf16.key: 0.25})
    assert found[two.key] == (0.5, ddp)


# Results.


def run_of(trial: Trial, number: int = 1, rate: float = 100.0, batch: int = 32, **figures: Any) -> RunRecord:
    known = {"samples_per_s": rate, "step_s": batch / rate, "train_loss": 0.5, "first_step_at": 3.0}
    given = {**known, "percentiles_s": [batch / rate] * 51, **figures}
    return RunRecord(
        trial.identity, number, "done", 1.0, figures={"work": {**WORK, "global_batch_size": batch}, **given}
    )


def compared(trials: Sequence[Trial], runs: Sequence[RunRecord], **values: str) -> Comparison:
    job, machine = ("-m", MNIST), {"cores": 2}
    return Comparison.of(trials, runs, job=job, strong=False, machine=machine, varied=varied(**values))


def test_results_have_medians_and_the_loss_beside_the_first() -> None:
    trials = trials_of(ranks="1,2", batch_size="16,32")
    first, other, third, last = trials
    runs = [run_of(first, number, rate) for number, rate in enumerate((90, 110, 100), 1)]
    runs += [run_of(other, train_loss=0.51), run_of(third, batch=64, train_loss=9.0)]
    runs += [RunRecord(third.identity, 2, "killed", 9.0, "had not ended")]
    found = compared(trials, runs, batch_size="16,32")
    assert [its.state for its in found.results] == ["done", "done", "done", "not run"]
    its = found.results[0]
    assert (len(its.runs), its.median("samples_per_s"), its.median("step_s")) == (3, 100, 0.32)
    assert (min(its.by_round("samples_per_s").values()), max(its.by_round("samples_per_s").values())) == (90, 110)
    # The third has steps of another size, and so another training.
    losses = [found.loss_to_first(its) for its in found.results]
    assert losses == [0, pytest.approx(0.02), 0, None]
    assert found.results[2].note == "killed in round 2: had not ended"
    assert [its.is_complete for its in found.results] == [True, True, False, False]
    assert found.results[3].trial is last


def test_last_run_of_a_round_counts() -> None:
    trials = trials_of(ranks="1,2,3", stages="1,2")
    failed = RunRecord(trials[0].identity, 1, "failed", 1.0, "out of memory")
    its = TrialResult.of(trials[0], [failed])
    assert (its.state, its.note) == ("failed", "failed in round 1: out of memory")
    its, *others = compared(trials, [failed, run_of(trials[0])], stages="1,2").results
    assert (its.state, its.note) == ("done", "")
    assert [other.state for other in others] == ["impossible", "not run", "not run", "not run", "impossible"]


def test_verdicts_compare_engines_in_each_variant() -> None:
    trials = trials_of(ranks="2", engines="horovod,ddp", batch_size="16,32")
    rates = {"horovod x 2, batch size 16": 150.0, "horovod x 2, batch size 32": 100.0}
    runs = [run_of(t, n, rates.get(t.label, 100.0) + n) for t in trials for n in range(1, 6)]
    small, large = compared(trials, runs, batch_size="16,32").verdicts()
    assert small.startswith("On 2 ranks with batch size 16, horovod is 1.4")
    assert large.startswith("On 2 ranks with batch size 32, no difference between horovod and ddp is visible")


def test_check_work_compares_within_a_variant() -> None:
    trials = trials_of(ranks="2", engines="horovod,ddp", batch_size="16,32")
    runs = [run_of(t, batch=2 * int(t.values["batch_size"])) for t in trials]
    compared(trials, runs, batch_size="16,32").check_work()
    runs[-1] = run_of(trials[-1], batch=63)
    with pytest.raises(OptionError, match="global batch: 64 and 63"):
        compared(trials, runs, batch_size="16,32").check_work()


# Reports.


def grid() -> Comparison:
    axes = {"stages": "1,2", "chunks": "2,4", "batch_size": "16,32"}
    trials = trials_of(ranks="1,2", **axes)
    runs = [run_of(t, rate=1000.0 + 7 * n, bubble=0.4) for n, t in enumerate(trials) if t.reason is None]
    return compared(
        trials, [*runs[:-1], RunRecord(trials[-1].identity, 1, "failed", 1.0, "out of memory")], **axes
    )


def test_report_names_trials_without_figures(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    report.show(grid(), tmp_path)
    text = capsys.readouterr().out
    assert re.search(r"ddp +2 +2 +2 +16 +1,084 ", text)
    assert re.search(r"ddp +2 +2 +2 +16 .* 40\.0% +33\.3%", text)
    assert re.search(r"ddp +1 +2 +2 +16 +- .* impossible", text)
    assert re.search(r"ddp +2 +2 +4 +32 .* failed *$", text, re.MULTILINE)
    assert re.search(
        r"^ddp x 1, stages 2, chunks 2, batch size 16; .* and 1 more: impossible: --stages 2 does not divide the ",
        text,
        re.MULTILINE,
    )
    assert "\nddp x 2, stages 2, chunks 4, batch size 32: failed in round 1: out of memory\n" in text
    assert "by more than 10% in " in text
    assert re.search(
        r"^  ddp x 2, stages 2, chunks 4, .* ms \(\+\d+%\) from ddp x 1, stages 1.*\n"
        r"    stages waited, sent and received for 40% of it and not 20%: \+33%; all else: \+\d+%$",
        text,
        re.MULTILINE,
    )
    with (tmp_path / "comparison.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["state"] for row in rows] == [its.state for its in grid().results]
    assert rows[0]["samples_per_s"] == "1000.0"
    page = (tmp_path / "comparison.html").read_text()
    assert "Heat map: throughput, samples/s" in page
    assert "from ddp x 1, stages 1" in page
    # Heat maps of the page once were saved without their style: letters were shapes, and names random.
    assert re.search(r"<text [^>]*>1,084</text>", page)
    report.show(grid(), tmp_path)
    assert (tmp_path / "comparison.html").read_text() == page
    assert json.loads((tmp_path / "comparison.json").read_text())["varied"]["chunks"] == ["2", "4"]


def test_long_heading_stays_in_the_picture() -> None:
    """It was cut at both ends."""
    figure = Figure(figsize=(4.5, 2.6))
    heat_map.set_heading(figure, "imdb --d-model 512 --d-hid 2048 --sequence-length 64, batch size 16, " * 3)
    place = figure.texts[0].get_window_extent()
    assert place.x0 > 0
    assert place.x1 < figure.bbox.width
    assert figure.get_figheight() > 2.6


def test_explain_splits_a_deviation() -> None:
    """Twice as long as predicted: waiting alone makes 0.8 / 0.5 of it."""
    trials = {trial.label: trial for trial in trials_of(ranks="1,4", stages="1,2", chunks="4", schedule="gpipe")}
    one, four = trials["ddp x 1, stages 1"], trials["ddp x 4, stages 2"]
    assert explain(four, one, {"off": 1.0, "bubble": 0.5}, 2) == [
        "stages waited, sent and received for 50% of it and not 20%: +60%; all else: +25%",
        "4 threads on 2 cores",
        "2 copies of the model work at once, and exchange gradients",
    ]
    assert explain(one, one, {"off": 1.0}, None) == []
    trials = {trial.label: trial for trial in trials_of(ranks="1,4", stages="1,2")}
    one, four = trials["ddp x 1, stages 1"], trials["ddp x 4, stages 2"]
    assert explain(four, one, {"off": 1.0}, None)[-1] == "chunks of 64 samples, one after the other"


def test_heat_maps_have_a_panel_for_ranks_and_stages(tmp_path: Path) -> None:
    comparison = grid()
    across, up = heat_map.inner_axes(comparison.axes)
    assert (across.name, up.name) == ("chunks", "batch_size")
    panels = heat_map.panels_of(comparison.results, comparison.axes, across, up)
    assert list(panels) == [f"ranks {r}, stages {s}" for r in (1, 2) for s in (1, 2)]
    assert [len(results) for results in panels.values()] == [4] * 4
    files = heat_map.write(comparison, heat_map.QUANTITIES[0], "a heading", tmp_path)
    assert [file.name for file in files] == ["throughput.png", "throughput.svg"]
    assert files[0].read_bytes().startswith(b"\x89PNG")
    drawn = files[1].read_text()
    for its in comparison.results:
        rate = its.median("samples_per_s")
        assert rate is None or f">{rate:,.0f}<" in drawn
    for text in ("a heading", "impossible", "failed", "batch size", "throughput, samples/s"):
        assert f">{text}<" in drawn
    assert "<pattern" in drawn  # the hatching
    assert heat_map.write(comparison, heat_map.QUANTITIES[1], "no figures", tmp_path) == []


def test_heat_maps_of_other_axes() -> None:
    """The memory of a model: no chunks, no batch sizes."""
    axes = {"precision": "fp32,bf16", "shard": "none,optimizer,full"}
    across, up = heat_map.inner_axes(axes_of(trials_of(ranks="2", engines="ddp,horovod", **axes), varied(**axes)))
    assert (across.name, up.name) == ("shard", "precision")
    across, up = heat_map.inner_axes(axes_of(trials_of(ranks="1,2"), []))
    assert (across.name, up.name) == ("ranks", "")


# Mistakes.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--", "-m", "hvd_trainer.nothing"], r"hvd_trainer\.nothing: there is no such module"),
        (["--", "-m", "hvd_trainer.jobs.models"], r"and that would run it"),
        (["--vary", "chunks=1,,2"], r"--vary chunks=1,,2: type an option of the job and its values with commas"),
        (["--vary", "seed"], r"--vary seed: type an option of the job and its values"),
        (
            ["--vary", "chunks=two"],
            r"does not take --chunks two\. Its options: python -m hvd_trainer\.mnist --help",
        ),
        (["--vary", "precision=fp99"], r"--precision fp99 \(there are: fp32, bf16, fp16\)"),
        (["--vary", "optimiser=sgd"], r"no option --optimiser\. Did you mean optimizer\?"),
        (["--vary", "compile=maybe"], r"--compile is a switch: type --vary compile=true,false"),
        (["--vary", "chunks=1", "--vary", "chunks=2"], r"--vary chunks is given twice"),
        (["--vary", "ranks=1,2"], r"--vary ranks=1,2: type --np 1,2,4"),
        (["--vary", "backend=ddp"], r"--vary backend=ddp: type --engines horovod,ddp"),
        (["--vary", "chunks=1", "--", "-m", MNIST, "--chunks", "2"], r"--chunks is varied, and stands behind --"),
        (["--vary", "compile=true", "--", "-m", MNIST, "--no-compile"], r"--compile is varied, and stands behind"),
        (["--vary", "chunks=1", "--", "-m", MNIST, "--nothing"], r"The job does not take --nothing"),
        (["--vary", "chunks=1", "--baseline", "ddp x.py"], r"which a --baseline has not: leave one out"),
    ],
)
def test_mistakes_are_refused_before_anything_runs(arguments: list[str], message: str, tmp_path: Path) -> None:
    given = arguments if "--" in arguments else [*arguments, "--", "-m", MNIST]
    given = given if "--vary" in given else ["--vary", "seed=1,2", *given]
    with pytest.raises(OptionError, match=message):
        cli.main(["--out", str(tmp_path / "out"), *given])
    assert not (tmp_path / "out").exists()


# The real thing.


def wait_until(what: Callable[[], object], limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def started(job: Job) -> bool:
    """Whether a run is on its way."""
    with suppress(psutil.NoSuchProcess):
        return any("torch.distributed.run" in process.cmdline() for process in job.processes())
    return False


@pytest.mark.nightly
def test_compare_resumes_after_kill(tmp_path: Path) -> None:
    """Its job lives on when the command is killed, and must not disturb the next one's."""
    folder = tmp_path / "out"
    command = [
        *("-m", "hvd_trainer", "compare", "--engines", "ddp", "--np", "2", "--rounds", "1", "--steps", "4"),
        *("--warmup-steps", "2", "--vary", "stages=1,2", "--vary", "chunks=2,999", "--out", str(folder)),
        *("--", "-m", MNIST, "--dataset", "digits", "--model", "mlp"),
    ]
    with start("python", 1, command) as job:
        wait_until((folder / "runs.jsonl").exists)
        wait_until(lambda: started(job))
        job.popen.send_signal(signal.SIGKILL)
        job.popen.wait()
        (first,) = (folder / "runs.jsonl").read_text().splitlines()
        assert job.processes()
        result = launch("python", 1, command)
    assert ", 2 of them impossible, 2 runs in 1 round, 1 to do" in result.stdout
    lines = (folder / "runs.jsonl").read_text().splitlines()
    assert lines[0] == first
    runs = [json.loads(line) for line in lines]
    assert [(run["identity"]["options"].get("stages", 1), run["state"]) for run in runs] == [
        (1, "done"),
        (2, "done"),
    ]
    assert runs[1]["figures"].keys() >= {"samples_per_s", "bubble", "peak_memory_mb", "train_loss"}
    assert 0 < runs[1]["figures"]["bubble"] < 1

    with (folder / "comparison.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["state"] for row in rows] == ["done", "impossible", "done", "impossible"]
    assert "--chunks 999 cuts --batch-size 128" in rows[1]["note"]
    drawn = (folder / "throughput.svg").read_text()
    for row, run in zip(rows[::2], runs, strict=True):
        assert float(row["samples_per_s"]) == run["figures"]["samples_per_s"]
        assert f">{formats.number(run['figures']['samples_per_s'])}<" in drawn
    assert float(rows[2]["bubble_formula"]) == pytest.approx(1 / 3)
    pictures = {f"{name}.{kind}" for name in ("throughput", "memory") for kind in ("png", "svg")}
    tables = {f"comparison.{kind}" for kind in ("json", "csv", "md", "html")}
    assert {path.name for path in folder.iterdir()} == {".lock", "runs.jsonl", *tables, *pictures}


@pytest.mark.nightly
@requires("horovod")
def test_compare_crosses_engines_and_options(tmp_path: Path) -> None:
    options = (
        "--np",
        "2",
        "--rounds",
        "1",
        "--steps",
        "3",
        "--warmup-steps",
        "1",
        "--vary",
        "sequence-length=8,16",
    )
    job = ("-m", "hvd_trainer.imdb", "--dataset", "synthetic", "--synthetic-reviews", "400")
    said = launch(
        "python", 1, ["-m", "hvd_trainer", "compare", "--out", str(tmp_path), *options, "--", *job]
    ).stdout
    for length in (8, 16):
        assert f"On 2 ranks with sequence length {length}, horovod has " in said
    assert said.count("Both have trained the same weights, to the last bit.") == 2
    assert "tokens/s" in said
    assert (tmp_path / "throughput.svg").exists()
