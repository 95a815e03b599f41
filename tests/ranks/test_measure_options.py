"""--max-steps, --until, --record-steps and --leave-out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launchers import QUICKEST, SUPPORT, launch, requires
from records import records

ENGINES = ("ddp", "horovod")
pytestmark = [requires("horovod"), pytest.mark.warm]


def train(log: Path, *options: str, ranks: int = 2, backend: str = "ddp") -> str:
    """Train on the 1,438 digits: 6 steps of 2 x 128 in an epoch, the last one smaller."""
    job = ["-m", "hvd_trainer.mnist", "--dataset", "digits", "--backend", backend, "--log-dir", str(log)]
    return launch(QUICKEST, ranks, [*job, *options]).stdout


@pytest.mark.parametrize("backend", ENGINES)
def test_max_steps_ends_a_run_that_resumes_exactly(tmp_path: Path, backend: str) -> None:
    """The end may be inside an epoch or at its end; the bits are those of an uninterrupted run."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    said = train(whole, "--max-steps", "14", "--epochs", "9", "--log-every", "2", backend=backend)
    assert "done: 14 steps" in said
    for steps in (4, 12, 14):
        options = ("--max-steps", str(steps), "--epochs", "9", "--log-every", "2", "--resume", "auto")
        assert f"done: {steps} steps" in train(parts, *options, backend=backend)
    assert (whole / "model.safetensors").read_bytes() == (parts / "model.safetensors").read_bytes()
    assert records(whole) == records(parts)
    ends = [(record["event"], record["epoch"], record["step"]) for record in records(whole)]
    assert ends[-2:] == [("epoch", 3, 14), ("end", 3, 14)]
    assert "done: nothing left to train" in train(parts, "--max-steps", "14", "--epochs", "9", "--resume", "auto")


def test_until_ends_a_run_at_its_target(tmp_path: Path) -> None:
    """The same command then has nothing left to do; one with a higher target trains on."""
    options = ("--epochs", "30", "--resume", "auto", "--until")
    said = train(tmp_path, *options, "test_accuracy=0.8", backend="horovod")
    assert "until    test_accuracy=0.8: reached, with 0.8" in said
    found = [line["test_accuracy"] for line in records(tmp_path) if line["event"] == "epoch"]
    assert [accuracy >= 0.8 for accuracy in found] == [False] * (len(found) - 1) + [True]
    assert "done: nothing left to train" in train(tmp_path, *options, "test_accuracy=0.8")
    more = train(tmp_path, *options, "test_loss=0", "--epochs", str(len(found) + 1))
    assert re.search(r"until    test_loss=0: not reached, with 0\.\d+$", more, re.MULTILINE)
    assert [line["epoch"] for line in records(tmp_path) if line["event"] == "epoch"][-1] == len(found) + 1


def test_until_reports_the_figure_of_an_unfinished_epoch(tmp_path: Path) -> None:
    said = train(tmp_path, "--max-steps", "4", "--until", "test_accuracy=0.999")
    assert re.search(r"until    test_accuracy=0.999: not reached, with 0\.\d+$", said, re.MULTILINE)


def test_until_refuses_an_unknown_figure(tmp_path: Path) -> None:
    result = launch(
        QUICKEST, 2, ["-m", "hvd_trainer.mnist", "--dataset", "digits", "--until", "accuracy=0.9"], check=False
    )
    assert result.returncode == 2
    known = "test_accuracy, test_loss, train_accuracy, train_loss"
    assert f"--until accuracy=0.9: this job has no accuracy, but {known}" in result.stderr


def steps_of(log: Path, rank: int) -> dict[str, Any]:
    with np.load(log / "steps" / f"rank-{rank}.npz") as arrays:
        return dict(arrays)


@pytest.mark.parametrize("backend", ENGINES)
def test_record_steps_keeps_times_of_every_rank(tmp_path: Path, backend: str) -> None:
    train(tmp_path, "--epochs", "2", "--log-every", "1", "--record-steps", backend=backend)
    ranks = [steps_of(tmp_path, rank) for rank in range(2)]
    lines = [record for record in records(tmp_path) if record["event"] == "step"]
    for its in ranks:
        assert its["step"].tolist() == list(range(1, 13))
        assert its["epoch"].tolist() == [1] * 6 + [2] * 6
        assert its["samples"].sum() == 2 * 1438
        assert its["lr"].tolist() == [line["lr"] for line in lines]
        assert not its["skipped"].any()
        parts = dict(zip(its["parts"].tolist(), its["seconds"].T, strict=True))
        assert set(parts) == {"data", "forward", "backward", "reduce", "step", "other"}
        assert (its["seconds"] >= 0).all()
        for name in ("forward", "backward", "reduce", "step"):
            assert (parts[name] > 0).all(), name
        assert its["began_at"] < its["first_step_at"]
        assert (its["cpu_s"] > 0).all()
    means = (ranks[0]["loss"] + ranks[1]["loss"]) / 2
    assert means == pytest.approx([line["train_loss"] for line in lines], rel=1e-6)
    assert ranks[0]["grad_norm"].tolist() == ranks[1]["grad_norm"].tolist()


def test_record_steps_counts_a_small_first_step(tmp_path: Path) -> None:
    """The first step holds all digits, fewer than the batch size, which was recorded instead."""
    train(tmp_path, "--epochs", "2", "--batch-size", "1000", "--record-steps")
    assert steps_of(tmp_path, 0)["samples"].tolist() == [1438, 1438]


def test_record_steps_shows_a_slow_phase(tmp_path: Path) -> None:
    """Each batch of rank 1 takes 30 ms to fetch: rank 1 has that time under data, and rank 0 waits in reduce."""
    job = [str(SUPPORT / "slow_rank_job.py"), "--backend", "ddp", "--epochs", "1", "--log-dir", "log"]
    launch(QUICKEST, 2, [*job, "--record-steps"], cwd=tmp_path)
    waited, fetched = (steps_of(tmp_path / str(rank) / "log", rank) for rank in range(2))
    column = fetched["parts"].tolist().index
    assert np.median(fetched["seconds"][:, column("data")]) > 0.03
    assert np.median(waited["seconds"][:, column("data")]) < 0.012
    assert np.median(waited["seconds"][:, column("reduce")]) > 0.02


@pytest.mark.parametrize("backend", ENGINES)
def test_leave_out_exchange_trains_ranks_apart(tmp_path: Path, backend: str) -> None:
    said = train(tmp_path, "--epochs", "1", "--leave-out", "exchange", "--record-steps", backend=backend)
    assert "without" in next(line for line in said.splitlines() if line.startswith("measure"))
    first, second = (steps_of(tmp_path, rank) for rank in range(2))
    assert (first["grad_norm"] != second["grad_norm"]).all()
    kept = {path.name for path in tmp_path.iterdir()}
    assert not kept & {"model.safetensors", "checkpoints"}


def test_leave_out_data_repeats_one_batch(tmp_path: Path) -> None:
    """The loss falls from step to step, however random the model is, over as many steps as usual."""
    options = ("--epochs", "2", "--leave-out", "data", "--record-steps", "--optimizer", "sgd", "--lr", "0.05")
    train(tmp_path, *options, "--model", "mlp", "--momentum", "0", ranks=1)
    its = steps_of(tmp_path, 0)
    assert len(its["step"]) == 24
    for epoch in (1, 2):
        assert (np.diff(its["loss"][its["epoch"] == epoch]) < 0).all()


def test_leave_out_data_of_a_stream_needs_max_steps(tmp_path: Path) -> None:
    script = tmp_path / "stream.py"
    script.write_text(STREAM)
    result = launch("python", 1, [str(script), "--leave-out", "data"], check=False)
    assert result.returncode == 2
    assert "add --max-steps" in result.stderr
    assert "done: 7 steps" in launch("python", 1, [str(script), "--leave-out", "data", "--max-steps", "7"]).stdout


STREAM = """
import torch
from torch.utils.data import IterableDataset
from hvd_trainer import Trainer, TrainerOptions, run_job

class Stream(IterableDataset):
    def __iter__(self):
        return ((torch.randn(4), i % 2) for i in range(300))

def main(options):
    with Trainer(options) as trainer:
        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer.fit(model, optimizer, torch.nn.functional.cross_entropy, Stream())

if __name__ == "__main__":
    run_job(TrainerOptions, main)
"""
