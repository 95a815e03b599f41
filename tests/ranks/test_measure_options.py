"""--max-steps and --until; what a tool's message makes a job on the Trainer do and record."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from combinations import case
from digits_job import train
from launchers import QUICKEST, SCRIPTS, SUPPORT, launch, requires, write_script
from records import records

from hvd_trainer import TrainerOptions, parse
from hvd_trainer.errors import OptionError
from hvd_trainer.measure.figures import read_figures
from hvd_trainer.measure.message import Message
from hvd_trainer.measure.trainer import obey
from hvd_trainer.tools.diagnose.profile import read_profiles

ENGINES = ("ddp", "horovod")
pytestmark = [requires("horovod"), pytest.mark.warm]


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
    said = train(tmp_path, *options, "val_accuracy>=0.8", backend="horovod")
    assert "until    val_accuracy>=0.8: reached, with 0.8" in said
    found = [line["val_accuracy"] for line in records(tmp_path) if line["event"] == "epoch"]
    assert [accuracy >= 0.8 for accuracy in found] == [False] * (len(found) - 1) + [True]
    assert "done: nothing left to train" in train(tmp_path, *options, "val_accuracy>=0.8")
    more = train(tmp_path, *options, "val_loss<=0", "--epochs", str(len(found) + 1))
    assert re.search(r"until    val_loss<=0: not reached, with 0\.\d+$", more, re.MULTILINE)
    assert [line["epoch"] for line in records(tmp_path) if line["event"] == "epoch"][-1] == len(found) + 1


def test_until_reports_the_figure_of_an_unfinished_epoch(tmp_path: Path) -> None:
    said = train(tmp_path, "--max-steps", "4", "--until", "val_accuracy>=0.999")
    assert re.search(r"until    val_accuracy>=0.999: not reached, with 0\.\d+$", said, re.MULTILINE)


def test_unknown_figures_are_refused(tmp_path: Path) -> None:
    wrong = ("--until", "accuracy>=0.9", "--keep-best", "min:val_mae", "--log-dir", str(tmp_path))
    result = launch(
        QUICKEST, 2, ["-m", "hvd_trainer.mnist", "--dataset", "digits", "--repeat", "1", *wrong], check=False
    )
    assert result.returncode == 2
    known = "train_accuracy, train_loss, val_accuracy, val_loss"
    assert f"--until 'accuracy>=0.9': this job has no accuracy, but {known}" in result.stderr
    assert f"--keep-best min:val_mae: this job has no val_mae, but {known}" in result.stderr


def measured(
    log: Path, words: Sequence[str], *, ranks: int = 2, backend: str = "ddp", by_run: bool = True, **message: Any
) -> str:
    """Run a job as the tools do, with recordings in `log`; return what it printed."""
    log.mkdir(exist_ok=True)
    variables = Message(log_dir=str(log), engine=backend, **message).variables()
    # Ranks of the quickest launcher have the engines of a Trainer, and not those of `run`, when they begin.
    launcher = "torchrun" if words[0].startswith(str(SCRIPTS)) else QUICKEST
    run = ["-m", "hvd_trainer", "run", "--backend", backend, "--"] if by_run else []
    return launch(launcher, ranks, [*run, *words], env=variables, cwd=log).stdout


def steps_of(log: Path, rank: int) -> dict[str, Any]:
    with np.load(log / "steps" / f"rank-{rank}.npz") as arrays:
        return dict(arrays)


DIGITS = ("-m", "hvd_trainer.mnist", "--dataset", "digits", "--repeat", "1")


@pytest.mark.parametrize("backend", ENGINES)
def test_steps_of_every_rank_are_recorded(tmp_path: Path, backend: str) -> None:
    words = (*DIGITS, "--epochs", "2", "--log-every", "1", "--log-dir", str(tmp_path / "own"))
    said = measured(tmp_path, words, backend=backend)
    assert f"backend  {backend}" in said
    ranks = [steps_of(tmp_path, rank) for rank in range(2)]
    lines = [record for record in records(tmp_path / "own") if record["event"] == "step"]
    for its in ranks:
        assert its["step"].tolist() == list(range(1, 13))
        assert its["samples"].sum() == 2 * 1438
        assert its["lr"].tolist() == [line["lr"] for line in lines]
        assert not its["skipped"].any()
        parts = dict(zip(its["parts"].tolist(), its["seconds"].T, strict=True))
        assert set(parts) == {"data", "forward", "backward", "collective", "step", "other"}
        assert (its["seconds"] >= 0).all()
        for name in ("forward", "backward", "collective", "step"):
            assert (parts[name] > 0).all(), name
        assert 0 < its["first_step_at"] < time.time()
    means = (ranks[0]["loss"] + ranks[1]["loss"]) / 2
    assert means == pytest.approx([line["train_loss"] for line in lines], rel=1e-6)
    figures = read_figures(tmp_path, 2, 0)
    assert figures is not None
    assert figures["work"]["on_trainer"]
    assert (figures["work"]["samples"], figures["work"]["global_batch_size"]) == (2 * 1438, 256)
    assert figures["val_accuracy"] == records(tmp_path / "own")[-1]["val_accuracy"]


def test_a_small_first_step_is_counted(tmp_path: Path) -> None:
    """The first step holds all digits, fewer than the batch size, which was recorded instead."""
    measured(tmp_path, (*DIGITS, "--epochs", "2", "--batch-size", "1000"))
    assert steps_of(tmp_path, 0)["samples"].tolist() == [1438, 1438]


def test_a_slow_phase_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each batch of rank 1 takes 30 ms to fetch: rank 1 has that time under data, and rank 0 waits in reduce."""
    monkeypatch.setenv("FAULT", "is slow:1:0")
    measured(tmp_path, (str(SUPPORT / "faulty_job.py"), "--epochs", "1"))
    waited, fetched = (steps_of(tmp_path, rank) for rank in range(2))
    column = fetched["parts"].tolist().index
    assert np.median(fetched["seconds"][:, column("data")]) > 0.03
    assert np.median(waited["seconds"][:, column("data")]) < 0.012
    assert np.median(waited["seconds"][:, column("collective")]) > 0.02


OWN = (*DIGITS, "--epochs", "1", "--log-dir", "own")
HVD, C10D = (str(SCRIPTS / f"{name}.py") for name in ("horovod_mnist", "torch_ddp"))


@pytest.mark.parametrize(
    ("job", "backend"),
    [
        *((OWN, backend) for backend in ENGINES),
        *(((HVD, "--epochs", "1"), "ddp"), ((C10D, "--epochs", "1"), "horovod")),
        case((HVD, "--epochs", "1"), "horovod", when="long"),
        case((C10D, "--epochs", "1"), "ddp", when="long"),
        *(case((*OWN, "--accumulate", "2"), backend, when="long") for backend in ENGINES),
        case((*OWN, "--stages", "2", "--model", "mlp"), "ddp", when="long"),
    ],
)
def test_without_the_exchange_ranks_train_apart(tmp_path: Path, job: tuple[str, ...], backend: str) -> None:
    """A script, and a job on the Trainer without `run`, by one switch; in stages, replicas of the model do."""
    ranks = 4 if "--stages" in job else 3
    measured(tmp_path, job, backend=backend, ranks=ranks, by_run=job[0] != "-m", exchange=False)
    found = [steps_of(tmp_path, rank) for rank in range(ranks)]
    assert len({str(each["weights"]) for each in found}) == ranks
    assert len({len(each["step"]) for each in found}) == 1
    if job[0] == "-m":
        kept = {path.name for path in (tmp_path / "own").iterdir()}
        assert not kept & {"model.safetensors", "checkpoints"}


def test_a_message_changes_steps_engine_and_options(tmp_path: Path) -> None:
    """A job that is typed with an engine and few epochs trains as a tool wants it."""
    words = (*DIGITS, "--epochs", "1", "--backend", "horovod", "--max-steps", "3")
    said = measured(tmp_path, words, max_steps=20, endless=True, options={"batch_size": 32})
    assert "backend  ddp" in said
    assert "batch    32 x 2 ranks" in said
    assert steps_of(tmp_path, 0)["samples"].tolist() == [64] * 20
    measured(tmp_path, words, max_steps=20)
    assert len(steps_of(tmp_path, 0)["step"]) == 3


@pytest.mark.parametrize("option", [("--reproducible", "2"), ("--shard", "full")])
def test_options_that_need_the_exchange_are_refused(option: tuple[str, ...]) -> None:
    options = parse(TrainerOptions, option)
    with pytest.raises(OptionError, match=option[0]):
        obey(Message(log_dir="", exchange=False), options)


def test_all_trainings_of_a_process_are_recorded(tmp_path: Path) -> None:
    """The second one had replaced the first."""
    fit = "trainer.fit(model, optimizer, loss, Stream())"
    text = STREAM.replace(fit, f"{fit}\n        {fit}").replace("def start():", "if __name__ == '__main__':")
    job = write_script(tmp_path / "job.py", text)
    measured(tmp_path / "log", (str(job), "--max-steps", "2"), ranks=1)
    its = steps_of(tmp_path / "log", 0)
    assert its["step"].tolist() == [1, 2, 3, 4]
    assert its["seconds"].shape[0] == len(its["loss"]) == 4


@pytest.mark.parametrize("start", ["run_job(TrainerOptions, main)", "main(TrainerOptions())"])
def test_it_is_recorded_whether_a_job_reads_options(tmp_path: Path, start: str) -> None:
    """Of a job that makes them in its code, a search had said that it takes --config."""
    job = tmp_path / "job.py"
    guarded = f"if __name__ == '__main__':\n    {start}"
    job.write_text(STREAM.replace("def start():\n    run_job(TrainerOptions, main)", guarded))
    measured(tmp_path / "log", (str(job),), ranks=1, max_steps=2)
    figures = read_figures(tmp_path / "log", 1, 0)
    assert figures is not None
    assert figures["work"]["reads_options"] == start.startswith("run_job")


AFTER_IT = """
        import os, subprocess, sys
        if os.environ.pop("OUTER", None):
            subprocess.run([sys.executable, __file__, "--max-steps", "1"], check=True)
"""


def test_a_process_that_a_rank_starts_leaves_its_recording_alone(tmp_path: Path) -> None:
    """It inherits the message, and a Trainer in it wrote one step in the place of its parent's three."""
    job = write_script(
        tmp_path / "job.py", STREAM.replace("def start():", f"{AFTER_IT}\nif __name__ == '__main__':")
    )
    message = Message(log_dir=str(tmp_path / "log")).variables()
    command = ["-m", "hvd_trainer", "run", "--", str(job), "--max-steps", "3"]
    said = launch(QUICKEST, 1, command, env=message | {"OUTER": "1"}).stdout
    assert "done: 1 step" in said
    assert steps_of(tmp_path / "log", 0)["step"].tolist() == [1, 2, 3]


BY_RUN = """
import hvd_trainer
if __name__ == "__main__":
    hvd_trainer.run(main, num_processes=5, args=(TrainerOptions(),))
"""
BY_COMMAND = """
import subprocess, sys
if __name__ == "__main__":
    command = [sys.executable, "-m", "hvd_trainer", "run", "-np", "2", "--", "-m", "hvd_trainer.mnist"]
    subprocess.run([*command, "--dataset", "digits", "--repeat", "1", "--max-steps", "3"], check=True)
"""


@pytest.mark.parametrize(("start", "ranks"), [(BY_RUN, 2), (BY_COMMAND, 1)], ids=["function", "command"])
def test_only_ranks_that_the_tool_has_started_are_measured(start: str, ranks: int, tmp_path: Path) -> None:
    """Ranks below two others waited without an end: one of them obeyed the message, and one did not."""
    text = STREAM.replace("def start():\n    run_job(TrainerOptions, main)", start)
    job = write_script(tmp_path / "job.py", text)
    measured(tmp_path / "log", (str(job),), ranks=ranks, max_steps=5)
    files = (tmp_path / "log").glob("steps/*")
    assert [len(np.load(file)["step"]) for file in files] == ([5, 5] if start == BY_RUN else [])


COUNT_HOOKS = """
        from torch.utils.data import dataloader
        hooks, function = 0, dataloader._MultiProcessingDataLoaderIter.__init__
        while hasattr(function, "__wrapped__"):
            hooks, function = hooks + 1, function.__wrapped__
        print("hooks:", hooks)
"""


def test_stacks_of_a_trainer_under_run_are_sampled_by_one_sampler(tmp_path: Path) -> None:
    """The script's hooks stayed below those of the Trainer, and each training added its own."""
    job, fit = tmp_path / "job.py", "        trainer.fit(model, optimizer, loss, Stream())\n"
    text = STREAM.replace(fit, 2 * fit + COUNT_HOOKS).replace("def start():", "if __name__ == '__main__':")
    job.write_text(text)
    said = measured(tmp_path / "log", (str(job), "--max-steps", "20"), ranks=1, sample_stacks=True)
    assert "hooks: 1" in said
    (profile,) = read_profiles(tmp_path / "log", 1)
    assert profile.on_trainer
    assert 0 < profile.steps <= 20


@pytest.mark.parametrize("words", [(), ("--backend", "ddp"), ("--backend", "horovod")])
def test_run_starts_a_trainer_wherever_it_is_made(tmp_path: Path, words: tuple[str, ...]) -> None:
    """No import at the top says so, and the job lies in a package that only PYTHONPATH knows."""
    package = tmp_path / "src" / "library"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "training.py").write_text(STREAM)
    job = tmp_path / "job.py"
    job.write_text(
        "import importlib\nif __name__ == '__main__':\n    importlib.import_module('library.training').start()\n"
    )
    command = ["-m", "hvd_trainer", "run", *words, "--", str(job), "--max-steps", "3"]
    env = {"PYTHONPATH": str(tmp_path / "src")}
    said = launch(QUICKEST, 2, command, env=env).stdout
    assert f"backend  {words[-1] if words else 'ddp'}:" in said
    assert f"the job sees {words[-1] if words else 'ddp'}" in said
    assert "done: 3 steps" in said


STREAM = """
import torch
from torch.utils.data import IterableDataset
from hvd_trainer import Trainer, TrainerOptions, run_job

class Stream(IterableDataset):
    def __iter__(self):
        return ((torch.randn(4), i % 2) for i in range(300))

def main(options):
    print("the job sees", options.engine.backend)
    with Trainer(options) as trainer:
        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = torch.nn.functional.cross_entropy
        trainer.fit(model, optimizer, loss, Stream())

def start():
    run_job(TrainerOptions, main)
"""
