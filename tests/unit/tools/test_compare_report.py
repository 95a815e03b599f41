"""`compare`: verdicts, tables, the page and its pictures."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from compared import WORK, compared, only, publish, run_of, trials_of, unseen

from hvd_trainer.measure.results import TrialResult
from hvd_trainer.measure.trials import RunRecord
from hvd_trainer.tools.compare import report
from hvd_trainer.tools.compare.choice import write_settings
from hvd_trainer.tools.compare.plan import CompareTrial
from hvd_trainer.tools.compare.plots import draw_heat_map, draw_speed, rows_of
from hvd_trainer.tools.compare.result import Comparison
from hvd_trainer.utils.text import COMMAND


def test_verdicts_say_who_how_much_and_why() -> None:
    plan = trials_of(ranks="1,2", backends="horovod,ddp")
    rates = {"horovod x 1": 1000, "ddp x 1": 1000, "horovod x 2": 1800, "ddp x 2": 1500}
    runs = [run_of(p, n, rates[p.label] + 10 * n + (n if p.ranks == 1 else 0)) for n in range(1, 6) for p in plan]
    made = compared(plan, [*runs, RunRecord(plan[0].identity, 6, "failed", 1.0, "no such <file>")])
    alone, together = (str(pair.verdict()) for pair in made.pairs)
    assert alone.startswith("On 1 rank no difference between horovod and ddp is visible at this noise: 1.00 times")
    assert together.startswith(
        "On 2 ranks horovod is 1.20 times as fast as ddp (mean of 5 rounds, 97.5 % interval 1.19 to "
    )
    assert "A step of ddp takes 27.43 ms longer: exchanging gradients +27.43 ms." in together
    assert together.endswith("Both have trained the same weights, to the last bit.")
    first, _, two, _ = made.results
    assert first.note == "failed in round 6: no such <file>"
    assert (first.median("startup_s"), first.weights) == (3.5, "abc")
    assert made.figures[two.trial.key]["efficiency"] == pytest.approx(0.885, abs=0.01)


def test_verdicts_compare_engines_in_each_variant() -> None:
    trials = trials_of(ranks="2", backends="horovod,ddp", batch_size="16,32")
    rates = {"horovod x 2, batch size 16": 150.0, "horovod x 2, batch size 32": 100.0}
    runs = [run_of(t, n, rates.get(t.label, 100.0) + n) for t in trials for n in range(1, 6)]
    pairs = [pair for pair in compared(trials, runs, batch_size="16,32").pairs if not pair.is_of_values]
    small, large = (pair.verdict().text for pair in pairs)
    assert small.startswith("On 2 ranks with batch size 16, horovod is 1.4")
    assert large.startswith("On 2 ranks with batch size 32, no difference between horovod and ddp is visible")


def test_speed_up_is_over_one_rank_of_the_same_engine_and_values() -> None:
    trials = trials_of(ranks="1,3", backends="horovod,ddp", batch_size="16,32")
    alone = [trial for trial in trials if trial.ranks == 1]
    made = compared(
        trials, runs_of(trials, {t.label: 20.0 * n for n, t in enumerate(alone, 1)}), batch_size="16,32"
    )
    speed_ups = [made.figures[result.trial.key]["speed_up"] for result in made.results if result.trial.ranks == 3]
    assert speed_ups == pytest.approx([100 / 20, 100 / 40, 100 / 60, 100 / 80])


NOISE = (0.999, 1.0, 1.001, 1.0, 1.0)


def runs_of(trials: Sequence[CompareTrial], rates: Mapping[str, float], **figures: Any) -> list[RunRecord]:
    """Return five runs of each trial, whose speeds are those of `rates` by label, or else 100."""
    return [
        run_of(trial, number, rates.get(trial.label, 100.0) * noise, **figures)
        for number, noise in enumerate(NOISE, 1)
        for trial in trials
    ]


def test_each_value_is_compared_with_the_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The most samples per second were named, without ratio and interval."""
    trials = trials_of(ranks="2", workers="0,1,2", bucket_mb="25,1")
    rates = {"ddp x 2, workers 2, bucket mb 25": 130.0, "ddp x 2, workers 1, bucket mb 1": 80.0}
    comparison = compared(trials, runs_of(trials, rates), workers="0,1,2", bucket_mb="25,1")
    assert len(comparison.pairs) == 5
    levels = [pair.speed.level for pair in comparison.pairs]
    assert min(levels) == pytest.approx(1 - 0.05 / 3)
    assert max(levels) == pytest.approx(1 - 0.05 / 5), "Holm's correction for five pairs, of which two are clear"
    made = report.conclude(comparison)
    first = "ddp with workers 0, bucket mb 25"
    assert made.answer.text.startswith(
        f"On 2 ranks ddp with workers 2, bucket mb 25 is 1.30 times as fast as {first} (mean of 5 rounds, 9"
    )
    assert "1 faster and 1 slower than the first, of 5." in made.answer.details
    publish(comparison, tmp_path)
    said = capsys.readouterr().out
    assert "Speed beside the first values" in said
    assert re.search(r"ddp +2 +1 +1 +0\.800 +9[89](\.\d+)? % interval 0\.\d+ to 0\.\d+ +slower", said), said
    assert said.count("no difference") == 3


def test_differences_that_do_not_matter_are_no_winners() -> None:
    """`horovod is 1.00 times as fast as ddp` was said for sure, of 0.3 %."""
    plan = trials_of(ranks="2", backends="horovod,ddp")
    runs = runs_of(plan, {"horovod x 2": 100.3})
    (pair,) = compared(plan, runs).pairs
    assert pair.verdict().text.startswith("On 2 ranks horovod is 1.00 times as fast as ddp")
    (pair,) = compared(plan, runs, least=0.01).pairs
    verdict = pair.verdict()
    text = "On 2 ranks no difference that matters is between horovod and ddp: 1.003 times, where 1.0% counts (mean"
    assert verdict.text.startswith(text)
    assert (verdict.state, verdict.badge) == ("sure", "NO DIFFERENCE THAT MATTERS")
    (pair,) = compared(plan, runs_of(plan, {"horovod x 2": 102.0}), least=0.01).pairs
    assert "horovod is 1.02 times as fast as ddp" in pair.verdict().text


ON_TRAINER = WORK | {"reads_options": True}


def test_the_last_line_starts_the_job_with_the_fastest_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the largest number of ranks, with the engine that was measured; the file has the options of the job's."""
    (tmp_path / "own.yaml").write_text("lr: 0.1\nbackend: horovod\nworkers: 0\n")
    job = ("job.py", "--backend", "horovod", "data", "--config", str(tmp_path / "own.yaml"))
    vary = {"workers": "0,2", "threads": "1,2", "bucket_mb": "25,1"}
    trials = trials_of(ranks="1,2", backends="horovod,ddp", job=job, **vary)
    faster = {f"{name}, workers 2, threads 2, bucket mb 1": 150.0 for name in ("ddp x 2", "horovod x 1")}
    out = tmp_path / "out"
    out.mkdir()
    (out / "horovod.yaml").write_text("of an earlier command")
    comparison = compared(trials, runs_of(trials, faster, work=ON_TRAINER), **vary)
    publish(comparison, out)
    words = f"job.py --backend ddp data --config {tmp_path}/own.yaml --workers 2 --threads 2 --bucket_mb 1"
    assert capsys.readouterr().out.splitlines()[-2] == f"Type: torchrun --nproc-per-node 2 {words}"
    text = (out / "ddp.yaml").read_text()
    assert list(yaml.safe_load(text).items()) == [
        *(("lr", 0.1), ("backend", "ddp"), ("workers", 2), ("threads", 2), ("bucket_mb", 1))
    ]
    assert text.startswith("# Found by: python -m hvd_trainer compare")
    assert "# On 2 ranks ddp with workers 2, threads 2, bucket mb 1 is 1.50 times as fast" in text
    assert not (out / "horovod.yaml").exists(), "it is faster on one rank only"


@pytest.mark.parametrize(
    ("work", "line"),
    [
        ({}, f"{COMMAND} run --np 2 --backend ddp --threads 2 --fusion-threshold-mb 0 -- train.py --fp16"),
        (
            ON_TRAINER | {"reads_options": False},
            "TrainerOptions(engine=EngineOptions(backend='ddp', threads=2))  # the job reads no options: write",
        ),
    ],
)
def test_what_to_type_for_a_job_without_options_of_the_trainer(
    work: Mapping[str, Any], line: str, tmp_path: Path
) -> None:
    """A script has some beneath it, of `run`; of a job that makes its options itself they go into its code."""
    vary = {"threads": "1,2", "fusion_threshold_mb": "64,0", "fp16": "false,true"}
    trials = trials_of(ranks="2", job=["train.py"], **vary)
    last = trials[-1]
    assert (last.threads, last.job) == (2, ("train.py", "--fp16"))
    assert last.options == {"threads": 2}, "a file of the job may have another number"
    assert " ".join(last.run_options).endswith("--exactly-horovod --fusion-threshold-mb 0")
    work = work or {"on_trainer": False, "steps": 235, "uses_hvd": True, "rates": WORK["rates"]}
    comparison = compared(trials, runs_of(trials, {last.label: 150.0}, work=work), **vary)
    (said,) = report.conclude(comparison).advice
    assert said.startswith(line)
    assert write_settings(comparison, tmp_path) == []


def test_an_option_that_the_script_is_typed_with_is_the_scripts() -> None:
    job = ["train.py", "--threads", "8", "--bucket_mb=4"]
    trials = trials_of(ranks="2", job=job, threads="1,2", bucket_mb="4,1")
    assert [trial.job[1:] for trial in trials] == [
        ("--threads", t, "--bucket_mb", b) for t in ("1", "2") for b in ("4", "1")
    ]
    assert {trial.threads for trial in trials} == {1}


def test_script_gets_the_samples_of_the_job(tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.touch()
    plan = trials_of(ranks="2", baselines=[f"ddp {script}"])
    found = compared(plan, [run_of(plan[0], 1, 1000), unseen(plan[1])])
    assert found.results[1].median("samples_per_s") == pytest.approx(500)
    (pair,) = found.pairs
    assert pair.speed.value == pytest.approx(2.0)


def test_script_without_a_loader_is_compared_by_steps(tmp_path: Path) -> None:
    """Its samples are not seen, and so neither are those of the baseline beside it: it ended in a KeyError."""
    script = tmp_path / "plain.py"
    script.touch()
    plan = trials_of(ranks="2", baselines=[f"ddp {script}"])
    (pair,) = compared(plan, [unseen(trial) for trial in plan]).pairs
    assert pair.speed.value == 1


def test_runs_of_different_goes_are_no_pairs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An engine that was added a day later has run beside nothing."""
    plan = trials_of(ranks="2", backends="horovod,ddp")
    apart = [replace(run_of(trial, n), go=float(place)) for place, trial in enumerate(plan) for n in (1, 2)]
    comparison = compared(plan, apart)
    assert comparison.pairs == []
    publish(comparison, tmp_path)
    said = capsys.readouterr().out
    assert "warning: horovod x 2 and ddp x 2 have run at different times, and in no round in turn" in said
    assert "Type: python -m hvd_trainer compare --rounds 7 -- -m hvd_trainer.mnist" in said
    together = [replace(run_of(trial, n), go=2.0) for trial in plan for n in (3, 4)]
    (pair,) = compared(plan, [*apart, *together]).pairs
    assert pair.speed.rounds == 2


def test_what_is_doubtful_and_what_failed_is_told_with_what_to_type() -> None:
    """Warnings of the commands that made the runs, failed rounds, too few of them; failed trials come first."""
    plan = trials_of(ranks="1,2", backends="horovod,ddp")
    runs = [replace(run_of(trial), warnings=("other programs are at work",)) for trial in plan]
    few = report.conclude(compared(plan, [*runs, RunRecord(plan[0].identity, 2, "failed", 1.0, "no memory")]))
    assert few.warnings == ["other programs are at work", "horovod x 1: failed in round 2: no memory"]
    assert "which is too few to tell a difference from noise" in few.answer.text
    assert few.advice == ["python -m hvd_trainer compare --rounds 5 -- -m hvd_trainer.mnist"]
    bad = [RunRecord(t.identity, 1, "failed", 1.0, "no memory", output=f"failed/{t.ranks}.txt") for t in plan[2:]]
    failed = report.conclude(compared(plan, [*map(run_of, plan[:2]), *bad]))
    assert (failed.answer.text, failed.answer.state) == ("2 of 4 trials failed.", "failed")
    assert failed.answer.details == [
        "horovod x 2; ddp x 2: failed in round 1: no memory",
        "What they printed is beside this report: failed/2.txt, failed/2.txt",
    ]
    assert failed.advice[0] == "python -m hvd_trainer compare --rounds 2 --retry-failed -- -m hvd_trainer.mnist"


def test_results_have_medians_and_the_sizes_of_batches() -> None:
    trials = trials_of(ranks="1,2", batch_size="16,32")
    first, other, third, last = trials
    runs = [run_of(first, number, rate) for number, rate in enumerate((90, 110, 100), 1)]
    runs += [run_of(other, train_loss=0.51), run_of(third, batch=64, train_loss=9.0)]
    runs += [RunRecord(third.identity, 2, "killed", 9.0, "had not ended")]
    found = compared(trials, runs, batch_size="16,32")
    assert [its.state for its in found.results] == ["done", "done", "done", "not run"]
    its, figures = found.results[0], found.figures[first.key]
    assert (len(its.runs), its.median("samples_per_s"), its.median("step_s")) == (3, 100, 2.56)
    assert (figures["lowest"], figures["highest"]) == (90, 110)
    assert report.notes(found)[0] == "Global batch: 256 on 1 rank, 64 on 2 ranks."
    assert found.results[2].note == "killed in round 2: had not ended"
    assert [its.is_complete for its in found.results] == [True, True, False, False]
    assert found.results[3].trial is last


def test_last_run_of_a_round_counts() -> None:
    trials = trials_of(ranks="1,2,3", stages="1,2")
    failed = RunRecord(trials[0].identity, 1, "failed", 1.0, "out of memory")
    its, *_ = TrialResult.collect(trials, [failed])
    assert (its.state, its.note) == ("failed", "failed in round 1: out of memory")
    its, *others = compared(trials, [failed, run_of(trials[0])], stages="1,2").results
    assert (its.state, its.note) == ("done", "")
    assert {other.state for other in others} == {"not run"}


def grid() -> Comparison:
    axes = {"stages": "1,2", "chunks": "2,4", "batch_size": "16,32"}
    trials = trials_of(ranks="1,2", **axes)
    runs = []
    for number, trial in enumerate(trials):
        if trial.ranks == 1 and trial.values["stages"] == "2":
            runs.append(RunRecord(trial.identity, 1, "failed", 1.0, "--stages 2 does not divide the 1 rank"))
        elif trial is not trials[-1]:
            runs.append(run_of(trial, rate=1000.0 + 7 * number, batch=32, bubble=0.4))
    return compared(trials, [*runs, RunRecord(trials[-1].identity, 1, "failed", 1.0, "out of memory")], **axes)


def test_report_names_trials_without_figures(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    publish(grid(), tmp_path)
    text = capsys.readouterr().out
    assert re.search(r"ddp +2 +2 +2 +16 +1,084 ", text)
    assert re.search(r"ddp +2 +2 +2 +16 .* 40\.0%", text)
    assert re.search(r"ddp +1 +2 +2 +16 +- .* failed", text)
    assert re.search(r"ddp +2 +2 +4 +32 .* failed *$", text, re.MULTILINE)
    assert re.search(
        r"^5 of 16 trials failed.\n"
        r"  ddp x 1, stages 2, chunks 2, batch size 16; .* and 1 more: failed in round 1: "
        r"--stages 2 does not divide the 1 rank\n  ddp x 2, stages 2, chunks 4, batch size 32: .* out of m",
        text,
        re.MULTILINE,
    )
    kept = json.loads((tmp_path / "comparison.json").read_text())
    assert [trial["state"] for trial in kept["trials"]] == [result.state for result in grid().results]
    assert kept["trials"][0]["samples_per_s"] == 1000
    assert kept["varied"]["chunks"] == ["2", "4"]
    page = (tmp_path / "comparison.html").read_text()
    assert "Heat map: throughput, samples/s" in page
    # Heat maps of the page once were saved without their style: letters were shapes, and names random.
    assert re.search(r"<text [^>]*>1,084</text>", page)
    publish(grid(), tmp_path)
    assert (tmp_path / "comparison.html").read_text() == page


def test_heat_map_has_a_row_for_each_combination() -> None:
    comparison = grid()
    rows = rows_of(comparison, comparison.varied[-1])
    assert list(rows) == [f"ranks {r}, stages {s}, chunks {c}" for r in (1, 2) for s in (1, 2) for c in (2, 4)]
    assert [len(results) for results in rows.values()] == [2] * 8
    (picture,) = draw_heat_map(comparison)
    assert picture.svg.startswith("<svg")
    for its in comparison.results:
        rate = its.median("samples_per_s")
        assert rate is None or f">{rate:,.0f}<" in picture.svg
    for text in ("failed", "batch size", "throughput, samples/s", *rows):
        assert f">{text}<" in picture.svg
    assert "<pattern" in picture.svg  # the hatching
    assert draw_heat_map(compared(trials_of(ranks="1,2"), [])) == []
    (speed,) = draw_speed(compared(trials_of(ranks="1,2"), [run_of(t) for t in trials_of(ranks="1,2")]).results)
    assert ">ranks<" in speed.svg
    assert ">linear scaling<" in speed.svg
    assert ">0<" in speed.svg, "1,800 looked like many times 1,000"
    trial = only(ranks="2")
    assert draw_speed(compared([trial], [unseen(trial)]).results) == []


def test_a_loss_is_that_of_the_first_round_also_where_it_diverged() -> None:
    """That of the second round stood in its place."""
    trial = only()
    runs = [run_of(trial, 1, train_loss=None), run_of(trial, 2, train_loss=0.7)]
    (result,) = compared([trial], runs).results
    assert result.median("train_loss") is None
