"""`python -m hvd_trainer compare`: its arithmetic, its refusals, and a comparison from the command to the page.

Its trials with varied options are in test_compare_vary.py.
"""

from __future__ import annotations

import json
import signal
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launchers import REPOSITORY, SCRIPTS, launch, requires, start

from hvd_trainer.errors import OptionError
from hvd_trainer.tools.compare import cli
from hvd_trainer.tools.compare.entries import read_entries
from hvd_trainer.tools.compare.equal_work import Side, differences, refuse_unequal
from hvd_trainer.tools.compare.plots import pictures
from hvd_trainer.tools.compare.result import Comparison
from hvd_trainer.tools.compare.trials import Trial, make_trials
from hvd_trainer.tools.compare.variants import make_variants, read_axes
from hvd_trainer.tools.runner import formats, trial_runner
from hvd_trainer.tools.runner.command import read_job
from hvd_trainer.tools.runner.ratio import interval_quantiles, ratio
from hvd_trainer.tools.runner.runs import RunRecord, Start, in_rounds, read_runs
from hvd_trainer.tools.runner.step_stats import curve, speed

JOB = ("-m", "hvd_trainer.mnist")
MNIST = REPOSITORY.parent / "shared" / "data" / "mnist"


def trials_of(
    engines: Sequence[str], numbers: Sequence[int], *, job: Sequence[str] = JOB, baselines: Sequence[str] = ()
) -> list[Trial]:
    entries = read_entries(engines, baselines, max_ranks=max(numbers), num_gpus=0)
    conditions = {"warmup_steps": 10}
    return make_trials(entries, numbers, make_variants(job, []), threads=1, conditions=conditions)


# What is run.


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "Name the job behind --"),
        (["-m"], "Name the job behind --"),
        (["--epochs", "1"], "begin with the job"),
        (["nowhere.py"], "there is no such file. A module is named by -m: -- -m nowhere.py"),
        (["-m", "nowhere.job"], "-m nowhere.job: there is no such module"),
        (["-m", ".job"], "-m .job: there is no such module"),
        ([*JOB, "--backend", "ddp"], "Leave --backend out of the job"),
        ([*JOB, "--log_dir=x"], "Leave --log_dir=x out of the job"),
    ],
)
def test_read_job_refuses_impossible_jobs(words: Sequence[str], message: str) -> None:
    with pytest.raises(OptionError) as caught:
        read_job(words)
    assert message in str(caught.value)


def test_read_job_accepts_python_in_front() -> None:
    assert read_job(["python", *JOB, "--epochs", "1"]) == (*JOB, "--epochs", "1")


@pytest.mark.parametrize(
    ("engines", "baselines", "message"),
    [
        (["mpi"], [], "--engines mpi: there are horovod, ddp, single"),
        (["ddp"], ["examples/mnist/plain_ddp.py"], "say what starts it"),
        (["ddp"], ["ddp"], "say what starts it"),
        (["ddp"], ["ddp nowhere.py"], "there is no file nowhere.py"),
        (["ddp", "ddp"], [], "ddp takes part twice"),
    ],
)
def test_read_entries_refuses_impossible_ones(
    engines: Sequence[str], baselines: Sequence[str], message: str
) -> None:
    with pytest.raises(OptionError) as caught:
        read_entries(engines, baselines, max_ranks=2, num_gpus=0)
    assert message in str(caught.value)


def test_make_trials_puts_engines_side_by_side() -> None:
    plan = trials_of(["horovod", "ddp", "single"], [1, 2])
    labels = [trial.label for trial in plan]
    assert labels == ["horovod x 1", "ddp x 1", "single x 1", "horovod x 2", "ddp x 2"]
    order = [(number, trial.label) for number, trial in in_rounds(plan, 3)]
    assert order == [(1, x) for x in labels] + [(2, x) for x in reversed(labels)] + [(3, x) for x in labels]
    assert len({trial.key for trial in plan}) == len(plan)


def test_measured_job_saves_nothing_unless_asked() -> None:
    (trial,) = trials_of(["ddp"], [2])
    assert trial.start(Path("log")).command[-11:] == [
        *("--save-every-epochs", "None", "--save-every-steps", "None", "--save-every-s", "None"),
        *("--backend", "ddp", "--log-dir", "log", "--record-steps"),
    ]
    (trial,) = trials_of(["ddp"], [2], job=(*JOB, "--save-every-steps", "5"))
    assert trial.start(Path("log")).command.count("--save-every-steps") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--np", "1,x"], "type numbers of ranks with commas"),
        (["--np", "0"], "type numbers of ranks with commas"),
        (
            ["--rounds", "-1", "--threads", "0", "--timeout-s", "0"],
            "--rounds must .*; --threads must .*; --timeout",
        ),
        (["--steps", "0"], "--steps must be 1 or more"),
    ],
)
def test_mistakes_are_refused_before_anything_runs(arguments: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=message):
        cli.main(["--out", str(tmp_path / "out"), *arguments, "--", *JOB])
    assert not (tmp_path / "out").exists()


def test_missing_package_is_named_before_anything_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(formats, "NEEDED", ("rich", "no_such_package"))
    with pytest.raises(OptionError, match=r"no_such_package.*Type: pip install 'hvd_trainer\[tools\]'"):
        cli.main(["--out", str(tmp_path / "out"), "--", *JOB])


@pytest.fixture
def measured_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Return a function that calls `measure`, with runs that end as its `ends` say, and lists them."""
    trials = trials_of(["ddp"], [1, 2, 4, 8])
    started: list[int] = []

    def start_nothing(start: Start, folder: Path, output: Path, *, limit_s: float) -> int | None:
        output.touch()
        ranks = int(start.command[start.command.index("--nproc-per-node") + 1])
        started.append(ranks)
        return {"done": 0, "failed": 1, "killed": None}[again.ends[ranks]]

    def again(**options: Any) -> list[int]:
        started.clear()
        cli.measure(trials, tmp_path, cli.Options(**options), strong=False)
        return started

    again.ends = {1: "done", 2: "failed", 4: "killed", 8: "done"}  # type: ignore[attr-defined]
    monkeypatch.setattr(trial_runner, "run_to_end", start_nothing)
    monkeypatch.setattr(Trial, "read", lambda *_: FIGURES)
    return again


def test_measure_repeats_killed_runs_but_not_failed_ones(measured_runs: Any) -> None:
    """A failed one is not run again, a killed one is at the next start, and one that is done never is."""
    ends = measured_runs.ends
    assert measured_runs(rounds=2) == [1, 2, 4, 8, 8, 1]
    ends[4] = "done"
    assert measured_runs(rounds=2) == [4, 4]
    assert measured_runs(rounds=2) == []
    assert measured_runs(rounds=3) == [1, 4, 8]
    assert measured_runs(rounds=1, retry_failed=True) == [2]
    ends[2] = "done"
    assert measured_runs(rounds=1, retry_failed=True) == [2]
    assert measured_runs(rounds=2) == [2]


# What the figures say.


def recorded(seconds: Sequence[Sequence[Sequence[float]]], **more: Any) -> list[dict[str, Any]]:
    """What ranks keep: by rank and step, the seconds of data, forward, backward, reduce, step and other."""
    samples = np.full(len(seconds[0]), 8)
    return [{"seconds": np.array(its), "samples": samples, "cpu_s": np.zeros(len(its)), **more} for its in seconds]


def test_speed_tells_exchange_from_straggler() -> None:
    quick = [[0.0, 1.0, 1.0, 5.0, 1.0, 0.0]] * 3
    slow = [[3.0, 1.0, 1.0, 2.0, 1.0, 0.0]] * 3
    warm = [[9.0] * 6]
    figures = speed(recorded([[*warm, *quick], [*warm, *slow]]), 1)
    assert figures["parts"]["exchange"] == 2.0
    assert figures["parts"]["straggler"] == 1.5
    assert figures["parts"]["data"] == 1.5
    assert sum(figures["parts"].values()) == figures["step_s"] == 8.0
    assert (figures["samples_per_s"], figures["counted_steps"]) == (1.0, 3)
    assert figures["computing_s"] == [3.0, 6.0]
    assert speed(recorded([quick]), 3) == {}


def test_curve_averages_ranks_that_have_a_loss() -> None:
    nan = float("nan")
    losses = ([nan, nan, nan, nan], [4.0, 3.0, nan, 1.0])
    ranks = [{"step": np.arange(1, 5), "loss": np.array(its)} for its in losses]
    assert curve(ranks) == [[1, 4.0], [2, 3.0], [4, 1.0]]
    long = [{"step": np.arange(1000), "loss": np.arange(1000.0)}]
    assert len(curve(long)) == 200
    assert curve(long)[0] == [2.0, 2.0]


def test_ratio_is_clear_only_above_the_noise() -> None:
    assert ratio([1.0], [2.0]).low is None
    clear = ratio([110, 111, 109, 112, 110], [100, 100, 100, 101, 100])
    assert clear.is_clear
    assert clear.low is not None
    assert 1.08 < clear.low <= clear.value <= (clear.high or 0) < 1.13
    noisy = ratio([110, 90, 105, 95, 100], [100, 100, 100, 100, 100])
    assert not noisy.is_clear
    assert ratio([3, 3, 3], [2, 2, 2]).is_clear
    # What t(4) is wider than the normal distribution: Phi(-2.776 x sqrt(5 / 4)).
    assert interval_quantiles(5)[0] == pytest.approx(0.00096, abs=1e-5)


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


def side(name: str, ranks: int = 2, **changed: Any) -> Side:
    return Side(name, ranks, {**WORK, **changed})


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"train_samples": 120000}, "samples per epoch: 60,000 and 120,000"),
        ({"steps": 236}, "optimizer steps: 235 and 236"),
        ({"global_batch_size": 512}, "global batch: 256 and 512"),
        ({"rates": [[0.002, 10], [0.004, 225]]}, "learning rate: 0.002 and 0.004 in step 11"),
        ({"precision": "bf16"}, "precision: fp32 and bf16"),
        ({"tf32": True}, "TF32: off and on"),
        ({"channels_last": True}, "channels last: off and on"),
        ({"skipped_steps": 3}, "skipped steps: 0 and 3"),
        ({"train_data": "digits"}, "data set: MNIST and digits"),
        ({"threads": 2}, "CPU threads per rank: 1 and 2"),
    ],
)
def test_unequal_work_is_refused_and_named(changed: Mapping[str, Any], text: str) -> None:
    with pytest.raises(OptionError) as caught:
        refuse_unequal(side("horovod"), side("ddp", **changed), strong=False)
    assert "horovod on 2 and ddp on 2 ranks have not done the same work" in str(caught.value)
    assert text in str(caught.value)


def test_work_may_differ_between_numbers_of_ranks() -> None:
    """Steps and global batch go with the ranks, unless the global batch shall stay."""
    four = side("ddp", 4, steps=118, global_batch_size=512, rates=[[0.004, 118]])
    assert differences(side("ddp"), four, strong=False) == []
    assert len(differences(side("ddp"), four, strong=True)) == 2
    assert differences(side("ddp"), side("ddp", 4, precision="bf16"), strong=False)


def test_unknown_work_of_a_script_is_not_compared() -> None:
    plain = Side("plain.py", 2, {"steps": 235, "parameters": 21840, "rates": [[0.002 * (1 + 1e-12), 235]]})
    assert differences(side("ddp"), plain, strong=False) == []


FIGURES: dict[str, Any] = {"work": WORK, "step_s": 0.1, "first_step_at": 1.0}


def run_of(trial: Trial, number: int, rate: float, **figures: Any) -> RunRecord:
    parts = dict.fromkeys(("data", "forward", "backward", "exchange", "straggler", "step", "other"), 0.001)
    known = {
        "work": WORK,
        "samples_per_s": rate,
        "step_s": 256 / rate,
        "step_p50_s": 256 / rate,
        "step_p95_s": 300 / rate,
        "parts": {**parts, "exchange": 256 / rate - 0.006},
        "percentiles_s": [256 / rate] * 51,
        "first_step_at": 103.5,
        "train_loss": 0.5,
        "weights": "abc",
        "curve": [[1, 2.0], [2, 1.0]],
    }
    return RunRecord(trial.identity, number, "done", 9.0, figures={**known, **figures}, began_at=100.0)


@pytest.fixture
def made() -> Comparison:
    plan = trials_of(["horovod", "ddp"], [1, 2])
    rates = {"horovod x 1": 1000, "ddp x 1": 1000, "horovod x 2": 1800, "ddp x 2": 1500}
    runs = [run_of(p, n, rates[p.label] + 10 * n + (n if p.ranks == 1 else 0)) for n in range(1, 6) for p in plan]
    runs += [RunRecord(plan[0].identity, 6, "failed", 1.0, "no such <file>")]
    return Comparison.of(plan, runs, job=JOB, strong=False, machine={"cores": 2, "load": 0.1})


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
    assert (first.startup_s, first.weights) == (3.5, "abc")
    assert made.efficiency(two) == pytest.approx(0.885, abs=0.01)


def test_script_gets_the_samples_of_the_job(tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.touch()
    plan = trials_of(["ddp"], [2], baselines=[f"ddp {script}"])
    plain = RunRecord(plan[1].identity, 1, "done", 9.0, figures={"work": {"steps": 235}, "step_s": 0.512})
    found = Comparison.of(plan, [run_of(plan[0], 1, 1000), plain], job=JOB, strong=False, machine={})
    assert found.results[1].median("samples_per_s") == pytest.approx(500)
    (pair,) = found.pairs
    assert pair.speed.value == pytest.approx(2.0)


def test_pictures_leave_out_unknown_figures() -> None:
    """An empty picture once had a warning about its missing names."""
    plan = trials_of(["ddp"], [2])
    silent = RunRecord(plan[0].identity, 1, "done", 9.0, figures={"work": {"steps": 235}, "step_s": 0.512})
    found = Comparison.of(plan, [silent], job=JOB, strong=False, machine={})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pictures(found) == []


# The page.


@pytest.mark.parametrize("width", [390, 1200])
def test_page_in_a_browser(made: Comparison, browser: Any, tmp_path: Path, width: int) -> None:
    """On a telephone and on a desk: nothing is wider than the window, and nothing is loaded or goes wrong."""
    cli.show(made, tmp_path)
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


# The real thing.


DIGITS = (*JOB, "--dataset", "digits", "--epochs", "1")


def command(out: Path, *options: str, job: Sequence[str] = DIGITS) -> list[str]:
    return ["-m", "hvd_trainer", "compare", "--out", str(out), "--warmup-steps", "2", *options, "--", *job]


@pytest.mark.long
@requires("horovod")
def test_compare_resumes_from_its_folder(tmp_path: Path) -> None:
    said = launch("python", 1, command(tmp_path, "--np", "2", "--rounds", "1")).stdout
    assert "2 trials (horovod x 2; ddp x 2), 2 runs in 1 round, 2 to do" in said
    assert "2/2  round 1, ddp x 2: " in said
    assert "1 round, which is too few to tell a difference from noise" in said
    assert "Both have trained the same weights, to the last bit." in said
    kept = json.loads((tmp_path / "comparison.json").read_text())
    assert [(run["identity"]["engine"], run["figures"]["work"]["steps"]) for run in kept["runs"]] == [
        ("horovod", 6),
        ("ddp", 6),
    ]
    for trial in kept["trials"]:
        assert trial["startup_s"] > 1
        assert trial["peak_memory_mb"] > 100
        assert trial["test_accuracy"] > 0.3
    assert "| horovod | 2 |" in (tmp_path / "comparison.md").read_text()
    assert (tmp_path / "comparison.html").stat().st_size > 20_000
    again = launch("python", 1, command(tmp_path, "--np", "2", "--rounds", "1")).stdout
    assert "2 runs in 1 round, 0 to do" in again
    assert again.splitlines()[1:] == said.splitlines()[3:]
    assert {path.name for path in tmp_path.iterdir()} == {
        *(".lock", "runs.jsonl"),
        *(f"comparison.{kind}" for kind in ("json", "csv", "md", "html")),
    }


UNEQUAL = """
import torch
from hvd_trainer import TensorData, Trainer, TrainerOptions, run_job

def main(options):
    with Trainer(options) as trainer:
        inputs = torch.randn(600, 8)
        data = TensorData(inputs, (inputs[:, 0] > 0).long())
        model = torch.nn.Linear(8, 2)
        lr = 0.1 * (trainer.world.size if options.engine.backend == "horovod" else 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        trainer.fit(model, optimizer, torch.nn.functional.cross_entropy, data)

if __name__ == "__main__":
    run_job(TrainerOptions, main)
"""


@pytest.mark.long
@requires("horovod")
def test_compare_refuses_a_rate_scaled_on_one_engine(tmp_path: Path) -> None:
    """As many tutorials do: their Horovod trains another model than their DDP."""
    script = tmp_path / "scaled.py"
    script.write_text(UNEQUAL)
    result = launch("python", 1, command(tmp_path / "out", "--np", "2", job=[str(script)]), check=False)
    assert result.returncode == 2
    assert "have not done the same work" in result.stderr
    assert "learning rate: 0.2 and 0.1 in step 1" in result.stderr
    assert "measure anew, with another --out" in result.stderr
    assert not (tmp_path / "out" / "comparison.html").exists()


def test_changed_script_has_another_key(tmp_path: Path) -> None:
    """What it did before in the same folder is nothing that its new runs are compared with."""
    script = tmp_path / "scaled.py"
    keys = set()
    for text in (UNEQUAL, UNEQUAL.replace("trainer.world.size if", "1 if")):
        script.write_text(text)
        (trial,) = trials_of(["ddp"], [2], job=[str(script)])
        keys.add(trial.key)
    assert len(keys) == 2


@pytest.mark.long
def test_compare_refuses_runs_without_counted_steps(tmp_path: Path) -> None:
    words = command(tmp_path, "--np", "1", "--engines", "ddp", "--warmup-steps", "12")
    result = launch("python", 1, words, check=False)
    assert result.returncode == 2
    assert "ddp x 1 makes 12 steps, and the first 12 do not count: give the job more --epochs" in result.stderr
    assert read_runs(tmp_path) == []


PLAIN = """
import os
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs = torch.randn(128, 8)
for step in range(9):
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(inputs), (inputs[:, 0] > 0).long()).backward()
    optimizer.step()
dist.destroy_process_group()
"""


@requires("horovodrun")
@pytest.mark.parametrize(
    "name",
    [
        "horovod_mnist.py",
        "with_accelerate.py",
        *(
            pytest.param(f"{it}.py", marks=pytest.mark.nightly)
            for it in ("torch_ddp", "with_fabric", "with_lightning")
        ),
    ],
)
def test_compare_takes_any_script(tmp_path: Path, name: str) -> None:
    """A script trains the same weights on both engines, without a change."""
    options = ("--np", "2", "--rounds", "1", "--warmup-steps", "2", "--steps", "10")
    said = launch("python", 1, command(tmp_path / "out", *options, job=[str(SCRIPTS / name)])).stdout
    assert "On 2 ranks horovod has " in said
    assert "Both have trained the same weights, to the last bit." in said
    assert "(global batch: 32 on 2 ranks)" in said
    assert ("The exchange is not seen apart" in said) == (name != "horovod_mnist.py")
    for run in read_runs(tmp_path / "out"):
        assert run.figures["work"]["steps"] == 12
        assert run.figures["work"]["samples"] == 12 * 32
        assert np.isfinite(run.figures["last_loss"])


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


def test_script_whose_ranks_train_alone_is_refused() -> None:
    """Nothing would be exchanged, which no exchange is as fast as."""
    (trial,) = trials_of(["ddp"], [2])
    with pytest.raises(
        OptionError, match=r"each of its processes has trained alone. Add to the script: hvd.init\(\)"
    ):
        trial.check_steps({"work": {"steps": 20, "world_size": 1}, "step_s": 0.1})


def test_unequal_scripts_are_told_what_to_type() -> None:
    one = Side("horovod", 2, {"steps": 20, "samples": 640, "rates": [[0.1, 20]]})
    other = Side("ddp", 2, {"steps": 22, "samples": 1280, "rates": [[0.1, 22]]})
    steps, samples = differences(one, other, strong=False)
    assert steps == "optimizer steps: 20 and 22. Type: compare --steps N, which ends each run"
    assert samples == "samples: 640 and 1,280. Type: DataLoader(..., sampler=DistributedSampler(dataset))"


@pytest.mark.nightly
def test_compare_runs_a_baseline_beside_the_job(tmp_path: Path) -> None:
    job, plain = tmp_path / "job.py", tmp_path / "plain.py"
    job.write_text(UNEQUAL)
    plain.write_text(PLAIN)
    options = ("--np", "2", "--rounds", "1", "--engines", "ddp", "--baseline", f"ddp {plain}")
    said = launch("python", 1, command(tmp_path / "out", *options, job=[str(job), "--epochs", "3"])).stdout
    assert "On 2 ranks ddp has " in said
    assert "times the speed of plain.py" in said
    (_, run) = read_runs(tmp_path / "out")
    work = run.figures["work"]
    assert (work["steps"], work["parameters"], work["rates"]) == (9, 18, [[0.1, 9]])
    assert "samples" not in work, "there is no DataLoader"
    # Another number of steps is other work.
    plain.write_text(PLAIN.replace("range(9)", "range(8)"))
    once_more = command(tmp_path / "other", *options, job=[str(job), "--epochs", "3"])
    result = launch("python", 1, once_more, check=False)
    assert result.returncode == 2
    assert "optimizer steps: 9 and 8" in result.stderr


@pytest.mark.nightly
def test_compare_names_failures_and_goes_on(tmp_path: Path) -> None:
    options = ("--np", "1", "--rounds", "2", "--engines", "ddp,single")
    job = (*JOB, "--dataset", "digits", "--epochs", "1", "--transport", "gloo")
    result = launch("python", 1, command(tmp_path, *options, job=job), check=False)
    assert result.returncode == 1
    assert "single x 1: failed in round 1: --transport gloo with --backend single" in result.stdout
    assert "round 2, ddp x 1: " in result.stdout
    assert "round 2, single x 1: " not in result.stdout


def test_compare_without_training_shows_nothing(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("print('hello')\n")
    out = ["--np", "1", "--engines", "single", "--rounds", "1", "--out", str(tmp_path / "out")]
    result = launch(
        "python", 1, ["-m", "hvd_trainer", "compare", *out, "--", str(tmp_path / "job.py")], check=False
    )
    assert result.returncode == 1
    assert "single x 1: failed: it ended without having trained: it took no optimizer step" in result.stdout
    assert result.stderr.splitlines()[-1] == "No run came to its end: there is nothing to show."
    assert not (tmp_path / "out" / "comparison.html").exists()


def test_compare_ends_the_running_job_on_ctrl_c(tmp_path: Path) -> None:
    with start("python", 1, command(tmp_path, "--np", "2", "--engines", "ddp")) as job:
        deadline = time.monotonic() + 60
        while not any("torch.distributed.run" in process.cmdline() for process in job.processes()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        job.popen.send_signal(signal.SIGINT)
        result = job.wait(60)
        job.check_nothing_left()
    assert result.returncode == 130
    assert "interrupted: the same command goes on from here" in result.stderr
