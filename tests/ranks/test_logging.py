"""Lines of the package go through the logger `hvd_trainer`, which a program can route and silence."""

from __future__ import annotations

import io
import logging
import subprocess
import sys
from pathlib import Path

import pytest
from launchers import REPOSITORY, launch

from hvd_trainer.observe.log_handler import LOGGER, RankHandler, install_handler

JOB = """
import logging, sys
import torch
from hvd_trainer import TensorData, Trainer, TrainerOptions, run_job

def train(options):
    data = TensorData(torch.randn(64, 4), torch.zeros(64, dtype=torch.long))
    model = torch.nn.Linear(4, 2)
    with Trainer(options) as trainer:
        trainer.fit(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.nn.functional.cross_entropy, data)

if __name__ == "__main__":
    set_up = sys.argv.pop(1)
    if set_up == "to a file":
        logging.basicConfig(filename="job.log", level=logging.INFO, format="%(name)s %(levelname)s %(message)s")
    elif set_up == "silent":
        logging.getLogger("hvd_trainer").setLevel(logging.ERROR)
    run_job(TrainerOptions, train)
"""
OPTIONS = ["--backend", "single", "--epochs", "1", "--device", "cpu"]


def run(folder: Path, set_up: str, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "job.py").write_text(JOB)
    return launch("python", 1, [str(folder / "job.py"), set_up, *OPTIONS, *options], cwd=folder, check=False)


def test_lines_are_printed_by_default(tmp_path: Path) -> None:
    result = run(tmp_path, "as it is")
    assert "epoch 1/1" in result.stdout
    assert "single" in result.stdout


def test_lines_go_to_the_programs_handlers(tmp_path: Path) -> None:
    result = run(tmp_path, "to a file")
    assert "epoch 1/1" not in result.stdout + result.stderr
    log = (tmp_path / "job.log").read_text()
    assert "hvd_trainer.observe.run_log INFO epoch 1/1" in log


def test_lines_can_be_silenced_but_not_errors(tmp_path: Path) -> None:
    assert "epoch 1/1" not in run(tmp_path, "silent").stdout
    assert "error: --epochs must be a whole number, 1 or more" in run(tmp_path, "silent", "--epochs", "0").stderr


def test_lines_that_nobody_reads_leave_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`python job.py | head` printed one for each line of the log."""

    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Closed())
    RankHandler().emit(logging.makeLogRecord({"levelno": logging.INFO, "msg": "epoch 1/1"}))
    assert capsys.readouterr().err == ""


def test_rank_0_logs_information_and_all_ranks_warnings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    handler = RankHandler()
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        for level in (logging.INFO, logging.WARNING):
            handler.emit(logging.makeLogRecord({"msg": f"{rank} {level}", "levelno": level}))
    said = capsys.readouterr()
    assert said.out == "0 20\n"
    assert said.err == "0 30\n1 30\n"


def test_handler_is_installed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    logger = logging.getLogger(LOGGER)
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "level", logging.NOTSET)
    for _ in range(2):
        install_handler()
    assert [type(handler) for handler in logger.handlers] == [RankHandler]
    assert logger.level == logging.INFO


def test_import_configures_no_logging() -> None:
    code = "import logging, hvd_trainer.training.job; print(logging.getLogger('hvd_trainer').handlers)"
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY)
    assert asked.stdout == "[]\n"


SCRIPT = """
import logging, sys
import torch
from hvd_trainer import EngineOptions, TensorData, Trainer, TrainerOptions

if "own" in sys.argv:
    logging.basicConfig()
data = TensorData(torch.randn(64, 4), torch.zeros(64, dtype=torch.long))
model = torch.nn.Linear(4, 2)
with Trainer(TrainerOptions(EngineOptions(backend="single")), ddp_kwargs={"static_graph": True}) as trainer:
    trainer.fit(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.nn.functional.cross_entropy, data)
"""


def test_trainer_of_a_plain_script_prints_its_lines(tmp_path: Path) -> None:
    """The package's own example printed nothing outside of a notebook and of `run_job`."""
    (tmp_path / "script.py").write_text(SCRIPT)
    said = launch("python", 1, [str(tmp_path / "script.py")], cwd=tmp_path).stdout
    assert "epoch 3/3" in said
    assert "left out static_graph of ddp_kwargs: here DistributedDataParallel exchanges no gradients" in said
    own = launch("python", 1, [str(tmp_path / "script.py"), "own"], cwd=tmp_path)
    assert "epoch" not in own.stdout + own.stderr, "the program has set up logging, for warnings"
