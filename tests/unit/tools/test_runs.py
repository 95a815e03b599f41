"""Runs of jobs that tools measure: their order, record, folder and time limit, and why they fail."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hvd_trainer.errors import OptionError
from hvd_trainer.tools.parity.cli import Options
from hvd_trainer.tools.probe.options import ProbeOptions
from hvd_trainer.tools.runner.command import read_command, read_job
from hvd_trainer.tools.runner.job_kind import is_trainer_job
from hvd_trainer.tools.runner.measured import Start, measured_start
from hvd_trainer.tools.runner.runs import (
    RunRecord,
    append_run,
    in_rounds,
    key_of,
    locked_folder,
    read_runs,
    run_once,
    why_it_failed,
)
from hvd_trainer.tools.runner.trial_runner import TrialRunner

TRAINER = "from hvd_trainer import Trainer\n"
JOB = ("-m", "hvd_trainer.mnist")


def test_number_of_ranks_may_be_spelled_as_for_horovodrun() -> None:
    options, job = read_command("parity", Options, ["-np", "3", "--", "setup.cfg", "-np", "5"])
    assert options.np == 3
    assert job == ("setup.cfg", "-np", "5")


def test_in_rounds_alternates_direction() -> None:
    order = list(in_rounds((1, 2, 4), 3))
    assert order == [(1, 1), (1, 2), (1, 4), (2, 4), (2, 2), (2, 1), (3, 1), (3, 2), (3, 4)]


def test_read_runs_leaves_out_a_torn_line(tmp_path: Path) -> None:
    identity = {"ranks": 2, "words": ["-m", "hvd_trainer.mnist"]}
    append_run(tmp_path, RunRecord(identity, 1, "done", 1.0, figures={"step_s": 0.1}))
    file = tmp_path / "runs.jsonl"
    file.write_bytes(file.read_bytes() + file.read_bytes()[:40])
    append_run(tmp_path, RunRecord(identity, 2, "done", 1.0, figures={"step_s": 0.1}))
    assert [run.round for run in read_runs(tmp_path)] == [1, 2]
    assert [run.identity for run in read_runs(tmp_path)] == [identity, identity]
    assert len({run.key for run in read_runs(tmp_path)}) == 1
    assert read_runs(tmp_path / "elsewhere") == []


def test_run_once_kills_a_run_past_its_limit(tmp_path: Path) -> None:
    """A launcher's ranks may have sessions of their own, which must end, too."""
    code = (
        "import subprocess, time; "
        "child = subprocess.Popen(['sleep', '60'], start_new_session=True); print(child.pid, flush=True); "
        "time.sleep(60)"
    )
    ended = run_once(
        [sys.executable, "-c", code],
        tmp_path,
        {"job": "sleep"},
        1,
        threads=1,
        limit_s=2.0,
        read=lambda log: None,
    )
    assert (ended.state, ended.note) == ("killed", "had not ended after 2 s (--timeout-s)")
    child = int((tmp_path / ended.output).read_text())
    status = Path(f"/proc/{child}/status")
    assert not status.exists() or "zombie" in status.read_text()
    assert not (tmp_path / "running").exists()


@pytest.mark.parametrize(
    ("message", "output", "reason"),
    [
        ("--stages 9 is too many\nType less", "", "--stages 9 is too many"),
        (
            "failure: rank 0\nTraceback (most recent call last):\n  File x\nMemoryError: much\n",
            "",
            "MemoryError: much",
        ),
        (None, "banner\n[rank 0] error: No such data\nW1122 torchrun speaks\n", "No such data"),
        (
            None,
            "error: Traceback (most recent call last):\n  File x\n    line\nKeyError: 1\n\nE1122",
            "KeyError: 1",
        ),
        (None, "nothing of use", "exit code 3"),
    ],
)
def test_failure_reason_is_one_line(message: str | None, output: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "output").write_text(output)
    if message is not None:
        (tmp_path / "error.json").write_text(json.dumps({"message": {"message": message}}))
    assert why_it_failed(tmp_path, 3) == reason


def test_locked_folder_refuses_a_second_command(tmp_path: Path) -> None:
    code = (
        "import fcntl, sys; lock = open(sys.argv[1], 'w'); fcntl.lockf(lock, fcntl.LOCK_EX); "
        "print('locked', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(OptionError, match="another one is using it"), locked_folder(tmp_path):
            pass
        other.communicate()
    with locked_folder(tmp_path):
        pass
    (tmp_path / "file").touch()
    with pytest.raises(OptionError, match="cannot be written to"), locked_folder(tmp_path / "file"):
        pass


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"job.py": "import hvd_trainer"}, True),
        ({"job.py": "import torch\nfrom horovod import torch as hvd\n"}, False),
        ({"job.py": "import hvd_trainer.hvd as hvd\nfrom hvd_trainer import c10d\n"}, False),
        ({"job.py": "from hvd_trainer import hvd, Trainer\n"}, True),
        ({"job.py": "def main():\n    import library\n", "library.py": TRAINER}, True),
        ({"job.py": "import library.model\n", "library/__init__.py": "", "library/model.py": TRAINER}, True),
        ({"job.py": "import library\n", "library/__init__.py": "from . import x", "library/x.py": TRAINER}, True),
        ({"job.py": "import json\n", "library.py": TRAINER}, False),
        ({"job.py": "import tensorflow as tf; print 'Python 2'"}, False),
    ],
)
def test_trainer_job_is_known_by_its_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: Mapping[str, str], expected: bool
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    assert is_trainer_job([str(tmp_path / "job.py"), "--lr", "1"]) is expected
    assert is_trainer_job(["-m", "job"]) is expected


def test_modules_of_the_package_are_trainer_jobs() -> None:
    assert is_trainer_job(["-m", "hvd_trainer.mnist"])


def test_measured_start_of_a_script_leaves_its_words_as_they_are(tmp_path: Path) -> None:
    """A script may have options of its own that are called like those of a Trainer job."""
    script = tmp_path / "train.py"
    script.write_text("import torch\n")
    words = (str(script), "--log-dir", "here", "--epochs", "2")
    assert read_job(words) == words
    log = tmp_path / "log"
    start = measured_start(words, engine="ddp", ranks=2, log=log, steps=7, leave_out=("data",))
    expected = ["--nproc-per-node", "2", "-m", "hvd_trainer", "run", "--backend", "ddp", "--", *words]
    assert start.command[-len(expected) :] == expected
    assert ProbeOptions.read(start.variables) == ProbeOptions(log_dir=str(log), max_steps=7, leave_out=("data",))


def test_measured_start_of_a_trainer_job_gives_it_options(tmp_path: Path) -> None:
    start = measured_start(JOB, engine="single", ranks=1, log=tmp_path, steps=7, leave_out=("data", "exchange"))
    words = " ".join(start.command)
    assert "--max-steps 7" in words
    assert "--leave-out data exchange" in words
    assert f"--log-dir {tmp_path}" in words
    assert not start.variables


def test_trial_runner_repeats_no_run_that_came_to_its_end(tmp_path: Path) -> None:
    """A run that fails is tried again by the same command, and one that a check refuses is not recorded."""

    def run(runner: TrialRunner, code: int, round_: int, **more: Any) -> RunRecord:
        command = [sys.executable, "-c", f"import sys; sys.exit({code})"]
        figures = {"step_s": 0.1}
        return runner.run(
            lambda log: Start(command, {}), {"job": 1}, round_, threads=1, read=lambda log: figures, **more
        )

    def refuse(run: RunRecord) -> None:
        raise OptionError("refused")

    first = TrialRunner(tmp_path, limit_s=60.0)
    assert run(first, 0, 1).state == "done"
    assert run(first, 3, 2).state == "failed"
    with pytest.raises(OptionError, match="refused"):
        run(first, 0, 3, check=refuse)
    second = TrialRunner(tmp_path, limit_s=60.0)
    assert run(second, 3, 1).state == "done"
    assert run(second, 0, 2).state == "done"
    assert not second.is_done(key_of({"job": 1}), 3)
    assert second.time_left([key_of({"job": 1})]).startswith(", about ")
