"""`compare`: the trials that it makes, and those that it refuses."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from compared import FIGURES, JOB, WORK, only, run_of, trials_of

from hvd_trainer.errors import OptionError
from hvd_trainer.measure import formats, machine
from hvd_trainer.measure.command import with_options
from hvd_trainer.measure.equal_work import differences, refuse_unequal
from hvd_trainer.measure.measured import MeasuredTrial
from hvd_trainer.measure.message import Message
from hvd_trainer.measure.start import Start
from hvd_trainer.measure.trials import RunRecord, TrialRunner
from hvd_trainer.tools.compare import cli
from hvd_trainer.tools.compare.options import CompareOptions
from hvd_trainer.tools.compare.plan import CompareTrial, read_axes
from hvd_trainer.tools.parity import traced_runs


def test_plan_yields_the_product_with_engines_side_by_side() -> None:
    trials = trials_of(ranks="1,2", backends="ddp,horovod,single", chunks="1,4")
    assert [tuple(trial.values.values()) for trial in trials] == [
        *((engine, "1", chunks) for chunks in "14" for engine in ("ddp", "horovod", "single")),
        *((engine, "2", chunks) for chunks in "14" for engine in ("ddp", "horovod")),
    ]
    assert len({trial.key for trial in trials}) == len(trials)
    last = trials[-1]
    assert last.ranks == 2
    assert last.job == (*JOB, "--chunks", "4")
    assert last.label == "horovod x 2, chunks 4"


def test_trial_key_is_that_of_its_words_and_conditions() -> None:
    plain = only(ranks="2", batch_size="128")
    assert plain.key == only("--batch_size", "128", ranks="2").key, "other axes find what was measured"
    assert plain.key != only(ranks="2", precision="bf16").key
    assert plain.key != only(ranks="2", batch_size="128", threads="2").key
    assert json.loads(plain.key) == plain.identity


def test_trial_key_depends_on_files_among_the_words_and_on_the_package(tmp_path: Path) -> None:
    """After an edit of its --config all is measured anew; what else a run has read, its record says."""
    script, own = tmp_path / "train.py", tmp_path / "own.yaml"
    baseline = f"ddp {script} --name 'a b'"

    def keys(text: str) -> list[str]:
        own.write_text(text)
        script.touch()
        trials = trials_of(f"--config={own}", job=[str(script)], baselines=[baseline])
        assert trials[1].job[-1] == "a b"
        return [trial.key for trial in trials]

    before, after = keys("lr: 0.1"), keys("lr: 0.2")
    assert (before[0] != after[0], before[1] == after[1]) == (True, True)
    assert keys("lr: 0.1") == before
    for name in ("host", "cpu", "cores", "package"):
        assert name in machine.conditions(machine.describe_machine()), "another machine measures anew"


def test_steps_option_sets_the_length_of_all_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the job's own epochs and the size of its data."""
    planned: list[CompareTrial] = []
    monkeypatch.setattr(cli, "measure", lambda trials, *_: planned.extend(trials))
    options = ("--steps", "20", "--warmup-steps", "5", "--backend", "ddp", "--vary", "batch-size=8,16")
    cli.main(["--out", str(tmp_path), *options, "--", *JOB, "--epochs", "1", "--max-steps=7"])
    messages = [Message.read(trial.start(tmp_path).variables) for trial in planned]
    assert len(messages) == 4
    assert {(message.max_steps, message.endless) for message in messages if message is not None} == {(25, True)}


def test_scripts_take_horovods_step_on_both_engines(tmp_path: Path) -> None:
    """Else a script for Horovod would compute other numbers on each; parity found its own tool's difference."""
    script = tmp_path / "train.py"
    script.write_text("import horovod.torch as hvd\n")
    trials = [*trials_of(job=[str(script)], backends="horovod,ddp", baselines=[f"ddp {script}"])]
    starts = [trial.start(tmp_path) for trial in trials]
    starts += [
        traced_runs.Side(name, name, [str(script)]).trial(2, 1, 5).start(tmp_path) for name in ("horovod", "ddp")
    ]
    asked = ["--exactly-horovod" in start.command for start in starts]
    assert asked == [True, True, False, True, True]


def test_values_of_options_are_varied_at_their_place() -> None:
    job = ("train.py", "--batch_size=8", "data", "--lr", "0.5", "folder", "--fp16")
    axes = read_axes(["batch-size=16,32", "lr=0.1", "fp16=true,false", "momentum=0.9"])
    variants = itertools.product(*([(axis.typed, value) for value in axis.values] for axis in axes))
    assert [" ".join(with_options(job, variant)[1:]) for variant in variants] == [
        f"--batch_size {size} data --lr 0.1 folder{fp16} --momentum 0.9"
        for size in (16, 32)
        for fp16 in (" --fp16", "")
    ]
    twice = with_options(("train.py", "--lr", "1", "--lr=2"), [("--lr", "0.1")])
    assert twice == ("train.py", "--lr", "0.1", "--lr", "0.1"), "of an option typed twice the last one counts"


def test_missing_package_is_named_before_anything_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(formats, "NEEDED", ("rich", "no_such_package"))
    with pytest.raises(OptionError, match=r"no_such_package.*Type: pip install .*\[tools\]'"):
        cli.main(["--out", str(tmp_path / "out"), "--", *JOB])


def test_measure_repeats_killed_runs_but_not_failed_ones(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A failed one is not run again, a killed one is at the next start, and one that is done never is."""
    trials = trials_of(ranks="1,2,4,8")
    ends: dict[int, int | None] = {1: 0, 2: 1, 4: None, 8: 0}
    started: list[int] = []

    def start_nothing(start: Start, folder: Path, output: Path, **_: object) -> int | None:
        output.touch()
        started.append(int(start.command[start.command.index("--nproc-per-node") + 1]))
        return ends[started[-1]]

    def measure(**options: Any) -> list[int]:
        started.clear()
        cli.measure(trials, TrialRunner(tmp_path), CompareOptions(**options))
        return started

    monkeypatch.setattr("hvd_trainer.measure.trials.run_to_end", start_nothing)
    monkeypatch.setattr(CompareTrial, "read", lambda *_: FIGURES)
    assert measure(rounds=2) == [1, 2, 4, 8, 8, 1]
    ends[4] = 0
    assert measure(rounds=2) == [4, 4]
    assert measure(rounds=2) == []
    assert measure(rounds=3) == [1, 4, 8]
    assert measure(rounds=1, retry_failed=True) == [2]
    ends[2] = 0
    assert measure(rounds=1, retry_failed=True) == [2]
    assert measure(rounds=2) == [2]


def test_only_work_with_the_same_values_of_options_is_compared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Many tutorials scale the rate on Horovod alone: their Horovod trains another model than their DDP."""
    trials = trials_of(ranks="2", backends="horovod,ddp", batch_size="16,32")
    runs = {trial.key: run_of(trial, batch=2 * int(trial.values["batch_size"])) for trial in trials}
    monkeypatch.setattr("hvd_trainer.measure.trials.run_to_end", lambda *_, **__: 0)
    monkeypatch.setattr(CompareTrial, "read", lambda trial, _: runs[trial.key].figures)
    cli.measure(trials, TrialRunner(tmp_path), CompareOptions(rounds=1))
    runs[trials[-1].key] = run_of(trials[-1], batch=63)
    for _ in range(2):  # also if both were measured before
        with pytest.raises(
            OptionError, match="horovod on 2 and ddp on 2 ranks .*\n  global batch: 64 and 63\nMake"
        ):
            cli.measure(trials, TrialRunner(tmp_path), CompareOptions(rounds=2))


def test_compare_without_training_says_that_it_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "job.py").write_text("print('hello')\n")

    def start_nothing(start: Start, folder: Path, output: Path, **_: object) -> int:
        output.touch()
        return 0

    monkeypatch.setattr("hvd_trainer.measure.trials.run_to_end", start_nothing)
    options = ["--np", "1", "--backend", "single", "--rounds", "1", "--out", str(tmp_path / "out")]
    assert cli.main([*options, "--", str(tmp_path / "job.py")]) == 1
    out = capsys.readouterr().out
    assert "single x 1: failed: it took no optimizer step that counts" in out
    assert "\n1 of 1 trial failed.\n  single x 1: failed in round 1: it took no optimizer step that counts" in out


# Equal work.


def run_with(entry: str, ranks: int = 2, **work: Any) -> RunRecord:
    return RunRecord({"entry": entry, "ranks": ranks}, 1, "done", 9.0, figures={"work": work})


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
        ({"samples": 1280}, "samples: 640 and 1,280. Type: DataLoader(..., sampler=DistributedSampler(dataset))"),
    ],
)
def test_unequal_work_is_refused_and_named(changed: Mapping[str, Any], text: str) -> None:
    with pytest.raises(OptionError) as caught:
        refuse_unequal(run_with("horovod", **WORK, samples=640), run_with("ddp", **{**WORK, **changed}))
    assert "horovod on 2 and ddp on 2 ranks have not done the same work" in str(caught.value)
    assert text in str(caught.value)


def test_work_may_differ_between_numbers_of_ranks() -> None:
    """Steps go with the ranks, unless the global batch stays."""
    two = run_with("ddp", **WORK)
    four = run_with("ddp", 4, **{**WORK, "steps": 118, "global_batch_size": 512, "rates": [[0.004, 118]]})
    assert differences(two, four) == []
    same_batch = run_with("ddp", 4, **{**WORK, "steps": 118, "rates": [[0.004, 118]]})
    (line,) = differences(two, same_batch)
    assert line.startswith("optimizer steps: 235 and 118")
    assert differences(two, run_with("ddp", 4, **{**WORK, "precision": "bf16"}))
    plain = run_with("plain.py", steps=235, parameters=21840, rates=[[0.002 * (1 + 1e-12), 235]])
    assert differences(two, plain) == [], "unknown work of a script is not compared"


def test_runs_that_measure_nothing_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ranks that train alone exchange nothing, which no exchange is as fast as."""
    figures: dict[str, Any] = {"work": {"steps": 20, "world_size": 1}, "step_s": 0.1}
    monkeypatch.setattr(MeasuredTrial, "read", lambda trial, log: figures)
    with pytest.raises(OptionError, match=r"its processes has trained alone. Add to the script: hvd.init\(\)"):
        only(ranks="2").read(tmp_path)
    figures = {"work": {"steps": 10}}
    with pytest.raises(OptionError, match=r"ddp x 1 makes 10 steps, and the first 10 do not count: give the job"):
        only().read(tmp_path)
