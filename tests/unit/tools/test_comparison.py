"""`python -m hvd_trainer compare` on recorded runs: trials, refusals, predictions, verdicts, tables."""

from __future__ import annotations

import csv
import itertools
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from hvd_trainer.errors import OptionError
from hvd_trainer.tools.compare import cli, heat_map, report
from hvd_trainer.tools.compare.equal_work import Side, differences, refuse_unequal
from hvd_trainer.tools.compare.plots import pictures
from hvd_trainer.tools.compare.prediction import Shape, explain, predict
from hvd_trainer.tools.compare.result import Comparison, TrialResult, side_of
from hvd_trainer.tools.compare.trials import Trial, make_trials, read_entries
from hvd_trainer.tools.compare.variants import NOT_APPLICABLE, Axis, make_variants, read_axes
from hvd_trainer.tools.runner import formats, trial_runner
from hvd_trainer.tools.runner.processes import Start
from hvd_trainer.tools.runner.records import RunRecord

JOB = ("-m", "hvd_trainer.mnist")
WORK = {
    "train_data": "MNIST",
    "train_samples": 60000,
    "steps": 235,
    "global_batch_size": 256,
    "rates": [[0.002, 235]],
    "precision": "fp32",
    "tf32": False,
    "channels_last": False,
    "skipped_steps": 0,
    "parameters": 21840,
    "threads": 1,
}
FIGURES = {"work": WORK, "step_s": 0.1, "first_step_at": 1.0}
PARTS = ("data", "forward", "backward", "exchange", "straggler", "step", "other")


def varied(**values: str) -> list[Axis]:
    return read_axes([f"{name}={text}" for name, text in values.items()])


def trials_of(
    *arguments: str,
    ranks: str = "1",
    engines: str = "ddp",
    job: Sequence[str] = JOB,
    baselines: Sequence[str] = (),
    threads: int = 1,
    **values: str,
) -> list[Trial]:
    numbers = [int(number) for number in ranks.split(",")]
    return make_trials(
        read_entries(engines.split(","), baselines, max_ranks=max(numbers), num_gpus=0),
        numbers,
        make_variants((*job, *arguments), varied(**values)),
        threads=threads,
        conditions={"warmup_steps": 10},
    )


def only(*arguments: str, **values: Any) -> Trial:
    (trial,) = trials_of(*arguments, **values)
    return trial


def run_of(trial: Trial, number: int = 1, rate: float = 100.0, batch: int = 256, **figures: Any) -> RunRecord:
    """Return a run whose steps take 6 ms, and the rest of their time the exchange."""
    step_s = batch / rate
    known = {
        "work": {**WORK, "global_batch_size": batch},
        "samples_per_s": rate,
        **{"step_s": step_s, "step_p50_s": step_s, "step_p95_s": 1.2 * step_s, "percentiles_s": [step_s] * 51},
        "parts": {**dict.fromkeys(PARTS, 0.001), "exchange": step_s - 0.006},
        "first_step_at": 103.5,
        "train_loss": 0.5,
        "weights": "abc",
        "curve": [[1, 2.0], [2, 1.0]],
    }
    return RunRecord(trial.identity, number, "done", 9.0, figures={**known, **figures}, began_at=100.0)


def unseen(trial: Trial) -> RunRecord:
    """Return a run of a script that tells no samples."""
    return RunRecord(trial.identity, 1, "done", 9.0, figures={"work": {"steps": 235}, "step_s": 0.512})


def compared(trials: Sequence[Trial], runs: Sequence[RunRecord], **values: str) -> Comparison:
    machine = {"cores": 2}
    return Comparison.of(trials, runs, job=JOB, strong=False, machine=machine, varied=varied(**values))


# Trials.


@pytest.mark.parametrize(
    ("engines", "baselines", "message"),
    [
        ("mpi", [], "--engines mpi: there are horovod, ddp, single"),
        ("ddp", ["examples/mnist/plain_ddp.py"], "say what starts it"),
        ("ddp", ["ddp"], "say what starts it"),
        ("ddp", ["ddp nowhere.py"], "there is no file nowhere.py"),
        ("ddp,ddp", [], "ddp takes part twice"),
    ],
)
def test_read_entries_refuses_impossible_ones(engines: str, baselines: Sequence[str], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        trials_of(engines=engines, baselines=baselines)


def test_make_trials_yields_the_product_with_engines_side_by_side() -> None:
    trials = trials_of(ranks="1,2", engines="ddp,horovod,single", chunks="1,4")
    assert [tuple(trial.values.values()) for trial in trials] == [
        *((engine, "1", chunks) for chunks in "14" for engine in ("ddp", "horovod", "single")),
        *((engine, "2", chunks) for chunks in "14" for engine in ("ddp", "horovod")),
    ]
    assert all(trial.reason is None for trial in trials if trial.entry.engine != "single")
    assert len({trial.key for trial in trials}) == len(trials)
    last = trials[-1]
    assert last.ranks == 2
    assert last.options is not None
    assert (last.options.parallel.chunks, last.options.engine.backend) == (4, "horovod")
    assert last.variant.words == (*JOB, "--chunks=4")
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
    assert reason in str(only(*arguments, **values).reason)


def test_options_that_change_nothing_add_no_trials() -> None:
    """One stage has no schedule: it runs once, and is possible although others have one."""
    trials = trials_of(ranks="2", stages="1,2", schedule="gpipe,1f1b,zero-bubble")
    assert [(trial.values["stages"], trial.values["schedule"]) for trial in trials] == [
        ("1", NOT_APPLICABLE),
        *(("2", name) for name in ("gpipe", "1f1b", "zero-bubble")),
    ]
    assert all(trial.reason is None for trial in trials)
    assert not any("schedule" in word for word in trials[0].variant.words)


def test_trial_key_depends_on_options_not_on_typing(tmp_path: Path) -> None:
    """Other axes in the same folder find what was measured; a script that was changed is another one."""
    plain = only(ranks="2", batch_size="128", precision="fp32")
    assert plain.key == only("--batch-size", "128", ranks="2", seed="0").key == only(ranks="2", seed="0").key
    assert plain.key != only(ranks="2", precision="bf16").key
    assert plain.key != only(ranks="2", job=("-m", "hvd_trainer.imdb"), seed="0").key
    assert plain.key != only(ranks="2", threads=2, seed="0").key
    assert json.loads(plain.key) == plain.identity
    script, keys = tmp_path / "train.py", set()
    for text in ("import torch\n", "import torch.nn\n"):
        script.write_text(text)
        keys.add(only(job=[str(script)]).key)
    assert len(keys) == 2


def test_measured_job_saves_nothing_unless_asked() -> None:
    assert only(ranks="2").start(Path("log")).command[-11:] == [
        *("--save-every-epochs", "None", "--save-every-steps", "None", "--save-every-s", "None"),
        *("--backend", "ddp", "--log-dir", "log", "--record-steps"),
    ]
    assert only("--save-every-steps", "5").start(Path("log")).command.count("--save-every-steps") == 1


def test_steps_option_sets_the_length_of_all_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the job's own epochs and the size of its data."""
    found: list[Trial] = []
    monkeypatch.setattr(cli, "measure", lambda trials, *_, **__: found.extend(trials))
    options = ("--steps", "20", "--warmup-steps", "5", "--engines", "ddp", "--vary", "batch-size=8,16")
    cli.main(["--out", str(tmp_path), *options, "--", *JOB, "--epochs", "1", "--max-steps=7"])
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


def test_make_variants_reads_options_of_a_job(tmp_path: Path) -> None:
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


def test_values_of_a_script_are_varied_at_their_place(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch\n")
    job = (str(script), "--batch_size=8", "data", "--lr", "0.5", "folder", "--fp16")
    axes = read_axes(["batch-size=16,32", "lr=0.1", "fp16=true,false", "momentum=0.9"])
    found = [" ".join(its.words[1:]) for its in make_variants(job, axes)]
    assert found == [
        f"--batch_size {size} data --lr 0.1 folder{fp16} --momentum 0.9"
        for size in (16, 32)
        for fp16 in (" --fp16", "")
    ]


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
        (["--vary", "chunks=1", "--", *JOB, "--chunks", "2"], r"--chunks is varied, and stands behind --"),
        (["--vary", "compile=true", "--", *JOB, "--no-compile"], r"--compile is varied, and stands behind"),
        (["--vary", "chunks=1", "--", *JOB, "--nothing"], r"The job does not take --nothing"),
        (["--vary", "chunks=1", "--baseline", "ddp x.py"], r"which a --baseline has not: leave one out"),
    ],
)
def test_mistakes_in_vary_are_refused_before_anything_runs(
    arguments: list[str], message: str, tmp_path: Path
) -> None:
    given = arguments if "--" in arguments else [*arguments, "--", *JOB]
    given = given if "--vary" in given else ["--vary", "seed=1,2", *given]
    with pytest.raises(OptionError, match=message):
        cli.main(["--out", str(tmp_path / "out"), *given])
    assert not (tmp_path / "out").exists()


def test_missing_package_is_named_before_anything_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(formats, "NEEDED", ("rich", "no_such_package"))
    with pytest.raises(OptionError, match=r"no_such_package.*Type: pip install 'hvd_trainer\[tools\]'"):
        cli.main(["--out", str(tmp_path / "out"), "--", *JOB])


def test_measure_repeats_killed_runs_but_not_failed_ones(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A failed one is not run again, a killed one is at the next start, and one that is done never is."""
    trials = trials_of(ranks="1,2,4,8")
    ends: dict[int, int | None] = {1: 0, 2: 1, 4: None, 8: 0}
    started: list[int] = []

    def start_nothing(start: Start, folder: Path, output: Path, *, limit_s: float) -> int | None:
        output.touch()
        started.append(int(start.command[start.command.index("--nproc-per-node") + 1]))
        return ends[started[-1]]

    def measure(**options: Any) -> list[int]:
        started.clear()
        cli.measure(trials, tmp_path, cli.Options(**options), strong=False)
        return started

    monkeypatch.setattr(trial_runner, "run_to_end", start_nothing)
    monkeypatch.setattr(Trial, "read", lambda *_: FIGURES)
    assert measure(rounds=2) == [1, 2, 4, 8, 8, 1]
    ends[4] = 0
    assert measure(rounds=2) == [4, 4]
    assert measure(rounds=2) == []
    assert measure(rounds=3) == [1, 4, 8]
    assert measure(rounds=1, retry_failed=True) == [2]
    ends[2] = 0
    assert measure(rounds=1, retry_failed=True) == [2]
    assert measure(rounds=2) == [2]


def test_compare_refuses_to_go_on_after_unequal_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Many tutorials scale the rate on Horovod alone: their Horovod trains another model than their DDP."""
    trials, options = trials_of(ranks="2", engines="horovod,ddp"), cli.Options(rounds=1)
    rates = {"horovod": [[0.004, 235]], "ddp": [[0.002, 235]]}
    monkeypatch.setattr(trial_runner, "run_to_end", lambda *_, **__: 0)
    monkeypatch.setattr(Trial, "read", lambda its, _: FIGURES | {"work": WORK | {"rates": rates[its.entry.name]}})
    for _ in range(2):  # also if both were measured before
        with pytest.raises(OptionError, match=r"learning rate: 0\.004 and 0\.002 in step 1\nMake the job do"):
            cli.measure(trials, tmp_path, options, strong=False)


def test_compare_without_training_shows_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "job.py").write_text("print('hello')\n")

    def start_nothing(start: Start, folder: Path, output: Path, *, limit_s: float) -> int:
        output.touch()
        return 0

    monkeypatch.setattr(trial_runner, "run_to_end", start_nothing)
    options = ["--np", "1", "--engines", "single", "--rounds", "1", "--out", str(tmp_path / "out")]
    assert cli.main([*options, "--", str(tmp_path / "job.py")]) == 1
    out, err = capsys.readouterr()
    assert "single x 1: failed: it ended without having trained: it took no optimizer step" in out
    assert err.splitlines()[-1] == "No run has come to its end: there is nothing to show."
    assert not (tmp_path / "out" / "comparison.html").exists()


# Equal work.


def side(name: str, ranks: int = 2, **changed: Any) -> Side:
    return Side(name, ranks, {**WORK, **changed})


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"train_samples": 120000}, "samples per epoch: 60,000 and 120,000"),
        ({"steps": 236}, "optimizer steps: 235 and 236. Type: compare --steps N, which ends each run"),
        ({"global_batch_size": 512}, "global batch: 256 and 512"),
        ({"rates": [[0.002, 10], [0.004, 225]]}, "learning rate: 0.002 and 0.004 in step 11"),
        ({"precision": "bf16"}, "precision: fp32 and bf16"),
        ({"tf32": True}, "TF32: off and on"),
        ({"channels_last": True}, "channels last: off and on"),
        ({"skipped_steps": 3}, "skipped steps: 0 and 3"),
        ({"train_data": "digits"}, "data set: MNIST and digits"),
        ({"threads": 2}, "CPU threads per rank: 1 and 2"),
        (
            {"samples": 1280},
            "samples: 640 and 1,280. Type: DataLoader(..., sampler=DistributedSampler(dataset))",
        ),
    ],
)
def test_unequal_work_is_refused_and_named(changed: Mapping[str, Any], text: str) -> None:
    with pytest.raises(OptionError) as caught:
        refuse_unequal(side("horovod", samples=640), side("ddp", **changed), strong=False)
    assert "horovod on 2 and ddp on 2 ranks have not done the same work" in str(caught.value)
    assert text in str(caught.value)


def test_work_may_differ_between_numbers_of_ranks_and_variants() -> None:
    """Steps and global batch go with the ranks, unless the global batch shall stay."""
    four = side("ddp", 4, steps=118, global_batch_size=512, rates=[[0.004, 118]])
    assert differences(side("ddp"), four, strong=False) == []
    assert len(differences(side("ddp"), four, strong=True)) == 2
    assert differences(side("ddp"), side("ddp", 4, precision="bf16"), strong=False)
    plain = Side("plain.py", 2, {"steps": 235, "parameters": 21840, "rates": [[0.002 * (1 + 1e-12), 235]]})
    assert differences(side("ddp"), plain, strong=False) == [], "unknown work of a script is not compared"
    trials = trials_of(ranks="2", engines="horovod,ddp", batch_size="16,32")
    sides = [side_of(t, run_of(t, batch=2 * int(t.values["batch_size"]))) for t in trials]
    assert not any(differences(one, other, strong=False) for one, other in itertools.combinations(sides, 2))
    wrong = side_of(trials[-1], run_of(trials[-1], batch=63))
    assert differences(sides[-2], wrong, strong=False) == ["global batch: 64 and 63"]


def test_runs_that_measure_nothing_are_refused() -> None:
    """Ranks that train alone exchange nothing, which no exchange is as fast as."""
    with pytest.raises(OptionError, match=r"its processes has trained alone. Add to the script: hvd.init\(\)"):
        only(ranks="2").check_steps({"work": {"steps": 20, "world_size": 1}, "step_s": 0.1})
    with pytest.raises(OptionError, match=r"ddp x 1 makes 10 steps, and the first 10 do not count: give the job"):
        only().check_steps({"work": {"steps": 10}})


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


def test_explain_splits_a_deviation() -> None:
    """Twice as long as predicted: waiting alone makes 0.8 / 0.5 of it."""
    trials = {trial.label: trial for trial in trials_of(ranks="1,4", stages="1,2", chunks="4", schedule="gpipe")}
    one, four = trials["ddp x 1, stages 1"], trials["ddp x 4, stages 2"]
    assert explain(four, one, 1.0, 0.5, 2) == [
        "stages waited, sent and received for 50% of it and not 20%: +60%; all else: +25%",
        "4 threads on 2 cores",
        "2 copies of the model work at once, and exchange gradients",
    ]
    assert explain(one, one, 1.0, None, None) == []
    trials = {trial.label: trial for trial in trials_of(ranks="1,4", stages="1,2")}
    one, four = trials["ddp x 1, stages 1"], trials["ddp x 4, stages 2"]
    assert explain(four, one, 1.0, None, None)[-1] == "chunks of 64 samples, one after the other"


# Results.


@pytest.fixture
def made() -> Comparison:
    plan = trials_of(ranks="1,2", engines="horovod,ddp")
    rates = {"horovod x 1": 1000, "ddp x 1": 1000, "horovod x 2": 1800, "ddp x 2": 1500}
    runs = [run_of(p, n, rates[p.label] + 10 * n + (n if p.ranks == 1 else 0)) for n in range(1, 6) for p in plan]
    return compared(plan, [*runs, RunRecord(plan[0].identity, 6, "failed", 1.0, "no such <file>")])


def test_verdicts_say_who_how_much_and_why(made: Comparison) -> None:
    alone, together = made.verdicts()
    assert alone.startswith("On 1 rank no difference between horovod and ddp is visible at this noise: 1.00 times")
    assert together.startswith(
        "On 2 ranks horovod is 1.20 times as fast as ddp (median ratio of 5 rounds, 95 % interval 1.19 to "
    )
    assert "A step of ddp takes 27.43 ms longer: exchanging gradients +27.43 ms." in together
    assert together.endswith("Both have trained the same weights, to the last bit.")
    first, _, two, _ = made.results
    assert first.note == "failed in round 6: no such <file>"
    assert (first.median("startup_s"), first.weights) == (3.5, "abc")
    assert made.figures[two.trial.key]["efficiency"] == pytest.approx(0.885, abs=0.01)


def test_verdicts_compare_engines_in_each_variant() -> None:
    trials = trials_of(ranks="2", engines="horovod,ddp", batch_size="16,32")
    rates = {"horovod x 2, batch size 16": 150.0, "horovod x 2, batch size 32": 100.0}
    runs = [run_of(t, n, rates.get(t.label, 100.0) + n) for t in trials for n in range(1, 6)]
    small, large = compared(trials, runs, batch_size="16,32").verdicts()
    assert small.startswith("On 2 ranks with batch size 16, horovod is 1.4")
    assert large.startswith("On 2 ranks with batch size 32, no difference between horovod and ddp is visible")


def test_script_gets_the_samples_of_the_job(tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.touch()
    plan = trials_of(ranks="2", baselines=[f"ddp {script}"])
    found = compared(plan, [run_of(plan[0], 1, 1000), unseen(plan[1])])
    assert found.results[1].median("samples_per_s") == pytest.approx(500)
    (pair,) = found.pairs
    assert pair.speed.value == pytest.approx(2.0)


def test_results_have_medians_and_the_loss_beside_the_first() -> None:
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
    # The third has steps of another size, and so another training.
    losses = [found.figures[trial.key]["loss_to_first"] for trial in trials]
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


# Reports.


def test_pictures_leave_out_unknown_figures() -> None:
    """An empty picture once had a warning about its missing names."""
    trial = only(ranks="2")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pictures(compared([trial], [unseen(trial)])) == []


@pytest.mark.parametrize("width", [390, 1200])
def test_page_in_a_browser(made: Comparison, browser: Any, tmp_path: Path, width: int) -> None:
    """On a telephone and on a desk: nothing is wider than the window, and nothing is loaded or goes wrong."""
    report.show(made, tmp_path)
    page = browser.new_page(viewport={"width": width, "height": 800})
    trouble: list[str] = []
    page.on("console", lambda message: trouble.append(message.text))
    page.on("pageerror", lambda error: trouble.append(str(error)))
    page.on("request", lambda request: trouble.append(request.url))
    page.goto((tmp_path / "comparison.html").as_uri())
    assert trouble == [(tmp_path / "comparison.html").as_uri()]
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.locator("figure svg").count() == 5
    for svg in page.locator("figure svg").all():
        box = svg.bounding_box()
        assert box is not None
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= width
    # Letters of the pictures are to be read on a telephone, too.
    sizes = page.evaluate("[...document.querySelectorAll('svg text')].map(t => t.getBoundingClientRect().height)")
    assert min(sizes) > 8
    text = page.inner_text("body")
    assert "On 2 ranks horovod is 1.20 times as fast as ddp" in text
    assert "horovod x 1: failed in round 6: no such <file>" in text
    assert "exchanging gradients" in page.locator("figure svg").nth(3).inner_html()
    printed = tmp_path / "page.pdf"
    page.pdf(path=str(printed), format="A4")
    assert printed.read_bytes().count(b"/Type /Page\n") <= 4


def grid() -> Comparison:
    axes = {"stages": "1,2", "chunks": "2,4", "batch_size": "16,32"}
    trials = trials_of(ranks="1,2", **axes)
    done = [trial for trial in trials if trial.reason is None][:-1]
    runs = [run_of(t, rate=1000.0 + 7 * n, batch=32, bubble=0.4) for n, t in enumerate(trials) if t in done]
    return compared(trials, [*runs, RunRecord(trials[-1].identity, 1, "failed", 1.0, "out of memory")], **axes)


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


def test_heat_maps_have_a_panel_for_ranks_and_stages(tmp_path: Path) -> None:
    comparison = grid()
    across, up = heat_map.inner_axes(comparison.axes)
    assert (across.name, up.name) == ("chunks", "batch_size")
    panels = heat_map.panels_of(comparison.results, comparison.axes, across, up)
    assert list(panels) == [f"ranks {r}, stages {s}" for r in (1, 2) for s in (1, 2)]
    assert [len(results) for results in panels.values()] == [4] * 4
    files, element = heat_map.write(comparison, heat_map.QUANTITIES[0], "a heading", tmp_path)
    assert ("a heading" in element, element.startswith("<svg")) == (False, True)
    assert [file.name for file in files] == ["throughput.png", "throughput.svg"]
    assert files[0].read_bytes().startswith(b"\x89PNG")
    drawn = files[1].read_text()
    for its in comparison.results:
        rate = its.median("samples_per_s")
        assert rate is None or f">{rate:,.0f}<" in drawn
    for text in ("a heading", "impossible", "failed", "batch size", "throughput, samples/s"):
        assert f">{text}<" in drawn
    assert "<pattern" in drawn  # the hatching
    assert heat_map.write(comparison, heat_map.QUANTITIES[1], "no figures", tmp_path) == ([], "")


def test_heat_maps_of_other_axes() -> None:
    """The memory of a model: no chunks, no batch sizes."""
    axes = {"precision": "fp32,bf16", "shard": "none,optimizer,full"}
    trials = trials_of(ranks="2", engines="ddp,horovod", **axes)
    across, up = heat_map.inner_axes(compared(trials, [], **axes).axes)
    assert (across.name, up.name) == ("shard", "precision")
    across, up = heat_map.inner_axes(compared(trials_of(ranks="1,2"), []).axes)
    assert (across.name, up.name) == ("ranks", "")
