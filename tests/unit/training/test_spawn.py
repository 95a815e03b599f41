"""`hvd_trainer.run`: what it cannot start; and a training in a notebook."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from launchers import REPOSITORY
from waiting import PATIENCE_S

import hvd_trainer
from hvd_trainer import History, LaunchError
from hvd_trainer.training.spawn import Results

UNGUARDED = """
import hvd_trainer

def job():
    return 3

print(hvd_trainer.run(job, num_processes=2))
"""
NOTEBOOK = """
import sys
from types import SimpleNamespace
sys.modules["IPython"] = SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=1))
import torch
from hvd_trainer import TensorData, Trainer, parse, TrainerOptions
with Trainer(parse(TrainerOptions, ["--epochs", "2", "--backend", "ddp"])) as trainer:
    model = torch.nn.Linear(2, 1)
    data = TensorData(torch.ones(64, 2), torch.ones(64, 1), name="ones")
    history = trainer.fit(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.nn.functional.mse_loss, data)
    print("last", history[-1]["epoch"])
"""


def run_python(code: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *words]
    return subprocess.run(command, input=code, capture_output=True, text=True, cwd=REPOSITORY, timeout=PATIENCE_S)


def test_unguarded_script_is_told_what_to_write(tmp_path: Path) -> None:
    """It ended in the tracebacks of multiprocessing."""
    (tmp_path / "script.py").write_text(UNGUARDED)
    ended = run_python("", str(tmp_path / "script.py"))
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].endswith('put that call under if __name__ == "__main__":')
    assert ended.stderr.count("Traceback") == 1


def test_standard_input_is_no_script() -> None:
    ended = run_python(UNGUARDED, "-")
    assert ended.stderr.splitlines()[-1].endswith("and standard input is none: save it as a file.")
    assert ended.stderr.count("Traceback") == 1


def test_what_cannot_be_sent_is_named() -> None:
    lock = threading.Lock()
    with pytest.raises(LaunchError, match=r"lambda.* to other processes, which is not possible: cannot pickle"):
        hvd_trainer.run(lambda: lock.acquire(), num_processes=1)


def test_notebook_shows_epochs_and_a_bar() -> None:
    """Nothing handled the lines of the log, and standard error is no terminal there."""
    ended = run_python(NOTEBOOK, "-")
    assert ended.returncode == 0, ended.stderr
    assert "epoch 2/2  train loss" in ended.stdout
    assert "last 2" in ended.stdout
    # It had named the file of the kernel.
    if len(os.sched_getaffinity(0)) > 1:
        assert re.search(r"for each core: hvd_trainer\.run\(function, num_processes=\d+\)$", ended.stdout, re.M)
    assert "epoch 2/2:   0%|" in ended.stderr


def test_results_that_are_nothing_are_not_shown() -> None:
    """`[None, None]` stood below the cell."""
    results = Results([None, None])
    assert results == [None, None]
    results._ipython_display_()
    with pytest.raises(NotImplementedError):  # by which IPython shows it as a list
        Results([None, 1])._ipython_display_()


def test_history_is_a_sequence() -> None:
    history = History([{"epoch": 1}, {"epoch": 2}])
    assert history[-1] == {"epoch": 2}
    assert history[:1] == [{"epoch": 1}]
    assert [record["epoch"] for record in history] == [1, 2]
    assert len(history) == 2
    assert not History()
