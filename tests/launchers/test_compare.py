"""`python -m hvd_trainer compare` from the command to the page; unit/tools/test_compare_*.py have all else."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import yaml
from combinations import case
from launchers import launch, requires, start
from waiting import wait_for

from hvd_trainer.measure.formats import number
from hvd_trainer.measure.tool_folder import MARKER
from hvd_trainer.measure.trials import read_runs

pytestmark = pytest.mark.warm

DIGITS = ("-m", "hvd_trainer.mnist", "--dataset", "digits", "--repeat", "1", "--epochs", "1")
SCRIPTS = Path(__file__).parents[1] / "scripts"


def command(out: Path, *options: str, job: Sequence[str] = DIGITS) -> list[str]:
    return ["-m", "hvd_trainer", "compare", "--out", str(out), "--warmup-steps", "2", *options, "--", *job]


FILES = {MARKER, "runs.jsonl", *(f"comparison.{kind}" for kind in ("json", "md", "html"))}


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
        assert trial["val_accuracy"] > 0.3
    assert "| horovod | 2 |" in (tmp_path / "comparison.md").read_text()
    again = launch("python", 1, command(tmp_path, "--np", "2", "--rounds", "1")).stdout
    assert "2 runs in 1 round, 0 to do" in again
    assert again.splitlines()[1:] == said.splitlines()[3:]
    assert {path.name for path in tmp_path.iterdir()} == FILES


@requires("horovodrun")
@pytest.mark.parametrize(
    "name",
    [
        *("horovod_mnist.py", "with_accelerate.py"),
        *(case(f"{it}.py", when="long") for it in ("torch_ddp", "with_fabric", "with_lightning")),
    ],
)
def test_compare_takes_any_script(tmp_path: Path, name: str) -> None:
    """A script trains the same weights on both engines, without a change."""
    options = ("--np", "2", "--rounds", "1", "--warmup-steps", "2", "--steps", "10")
    said = launch("python", 1, command(tmp_path / "out", *options, job=[str(SCRIPTS / name)])).stdout
    assert "On 2 ranks horovod has " in said
    assert "Both have trained the same weights, to the last bit." in said
    assert "Global batch: 32 on 2 ranks." in said
    assert ("The exchange is not seen apart" in said) == (name != "horovod_mnist.py")
    for run in read_runs(tmp_path / "out"):
        assert run.figures["work"]["steps"] == 12
        assert run.figures["work"]["samples"] == 12 * 32
        assert np.isfinite(run.figures["last_loss"])


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


JOB_BESIDE = """
import torch
from hvd_trainer import TensorData, Trainer, TrainerOptions, run_job

def main(options):
    with Trainer(options) as trainer:
        inputs = torch.randn(600, 8)
        data = TensorData(inputs, (inputs[:, 0] > 0).long())
        model = torch.nn.Linear(8, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer.fit(model, optimizer, torch.nn.functional.cross_entropy, data)

if __name__ == "__main__":
    run_job(TrainerOptions, main)
"""


@pytest.mark.long
def test_compare_runs_a_baseline_beside_the_job(tmp_path: Path) -> None:
    job, plain = tmp_path / "job.py", tmp_path / "plain.py"
    job.write_text(JOB_BESIDE)
    plain.write_text(PLAIN)
    options = ("--np", "2", "--rounds", "1", "--backend", "ddp", "--baseline", f"ddp {plain}")
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


def test_option_that_a_script_does_not_know_ends_the_comparison(tmp_path: Path) -> None:
    """Each of its values was tried on each engine, with one message for all."""
    script = tmp_path / "train.py"
    script.write_text("import argparse\nargparse.ArgumentParser().parse_args()\n")
    options = ("--backend", "ddp", "--np", "1", "--vary", "learningrate=1,2,3")
    result = launch("python", 1, command(tmp_path / "out", *options, job=[str(script)]), check=False)
    assert result.returncode == 2
    assert "error: --vary learningrate: the job has no such option (unrecognized arguments: " in result.stderr
    assert len(read_runs(tmp_path / "out")) == 1


@pytest.mark.long
def test_compare_varies_options(tmp_path: Path) -> None:
    """What the job refuses is a failed trial with its reason, and the heat map has the figures of the others."""
    options = ("--backend", "ddp", "--np", "2", "--rounds", "1", "--steps", "4")
    vary = ("--vary", "stages=1,2", "--vary", "chunks=2,999")
    result = launch("python", 1, command(tmp_path, *options, *vary, job=(*DIGITS, "--model", "mlp")), check=False)
    assert result.returncode == 1
    assert "4 runs in 1 round, 4 to do" in result.stdout
    assert [run.state for run in read_runs(tmp_path)] == ["done", "failed", "done", "failed"]
    rows = json.loads((tmp_path / "comparison.json").read_text())["trials"]
    assert [row["state"] for row in rows] == ["done", "failed", "done", "failed"]
    assert "--chunks 999 cuts a batch of 128" in rows[1]["note"]
    assert rows[0]["bubble"] is None
    assert 0 < rows[2]["bubble"] < 1
    drawn = (tmp_path / "comparison.html").read_text()
    for row in rows[::2]:
        assert f">{number(row['samples_per_s'])}<" in drawn
    assert {path.name for path in tmp_path.iterdir()} == {*FILES, "failed"}


@pytest.mark.long
@requires("horovod")
def test_compare_crosses_engines_and_options(tmp_path: Path) -> None:
    options = ("--np", "2", "--rounds", "1", "--steps", "3", "--vary", "sequence-length=8,16")
    job = ("-m", "hvd_trainer.imdb", "--dataset", "synthetic", "--synthetic-reviews", "400")
    said = launch("python", 1, command(tmp_path, *options, job=job)).stdout
    for length in (8, 16):
        assert f"On 2 ranks with sequence length {length}, horovod has " in said
    assert said.count("Both have trained the same weights, to the last bit.") == 2
    assert "tokens/s" in said


def test_compare_ends_the_running_job_on_ctrl_c(tmp_path: Path) -> None:
    with start("python", 1, command(tmp_path, "--np", "2", "--backend", "ddp")) as job:
        wait_for(lambda: any("torch.distributed.run" in its.cmdline() for its in job.processes()))
        job.popen.send_signal(signal.SIGINT)
        result = job.wait()
        job.check_nothing_left()
    assert result.returncode == 130
    assert result.stderr.splitlines()[-2:] == [
        "interrupted: the same command continues from here",
        "No run has come to its end: there is nothing to show.",
    ]


SLOW_DISK = """
import time
import torch
from torch.utils.data import Dataset
from hvd_trainer import Trainer, TrainerOptions, run_job

class SlowDisk(Dataset):
    def __len__(self):
        return 4096
    def __getitem__(self, index):
        time.sleep(0.004)
        return torch.zeros(64), index % 2

def main(options):
    with Trainer(options) as trainer:
        model = torch.nn.Linear(64, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        trainer.fit(model, optimizer, torch.nn.functional.cross_entropy, SlowDisk())

if __name__ == "__main__":
    run_job(TrainerOptions, main)
"""


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_fastest_values_are_what_to_type(tmp_path: Path) -> None:
    """A disk that makes a step wait: loader processes are what helps, and the last line has them."""
    job, own, out = tmp_path / "job.py", tmp_path / "own.yaml", tmp_path / "out"
    job.write_text(SLOW_DISK)
    own.write_text("batch-size: 4\nthreads: 1\n")
    options = ["--np", "1", "--backend", "ddp", "--rounds", "3", "--steps", "60", "--vary", "workers=0,2"]
    compare = command(out, *options, job=[str(job), "--config", str(own)])
    said = launch("python", 1, compare, timeout_s=500).stdout
    assert "On 1 rank ddp with workers 2 is " in said, said
    again = launch("python", 1, compare).stdout
    assert "6 runs in 3 rounds, 0 to do" in again
    assert again.splitlines()[-2:] == said.splitlines()[-2:]
    start = f"torchrun --nproc-per-node 1 {job} --config {own}"
    assert again.splitlines()[-2] == f"Type: {start} --workers 2 --backend ddp"
    tuned = yaml.safe_load((out / "ddp.yaml").read_text())
    assert tuned == {"batch_size": 4, "threads": 1, "backend": "ddp", "workers": 2}
    trained = launch("torchrun", 1, [str(job), "--config", str(out / "ddp.yaml"), "--max-steps", "3"]).stdout
    assert "4 x 1 rank" in trained
