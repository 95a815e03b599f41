"""Runs of jobs that tools measure: their order, record, folder and time limit, and why they fail."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import environments
import numpy as np
import psutil
import pytest
from code_trial import CodeTrial

from hvd_trainer.errors import OptionError
from hvd_trainer.launch.world import World, detect
from hvd_trainer.measure import machine
from hvd_trainer.measure.command import read_command, read_job
from hvd_trainer.measure.failure_reason import why_it_failed
from hvd_trainer.measure.figures import are_figures, last_loss, speed
from hvd_trainer.measure.formats import to_json
from hvd_trainer.measure.measured import MeasuredTrial
from hvd_trainer.measure.message import Message
from hvd_trainer.measure.results import TrialResult
from hvd_trainer.measure.start import MARK, Start, find_processes, launched
from hvd_trainer.measure.steps import FOLDER
from hvd_trainer.measure.tool_folder import locked_folder, make_inner
from hvd_trainer.measure.trials import RunRecord, TrialRunner, append_run, in_rounds, read_runs
from hvd_trainer.tools.parity.cli import ParityOptions


def test_number_of_ranks_may_be_spelled_as_for_horovodrun() -> None:
    options, job = read_command("parity", ParityOptions, ["-np", "3", "--", "setup.cfg", "-np", "5"])
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


def test_reports_are_json_without_nan_and_infinity() -> None:
    report = {"noise": math.inf, "loss": np.float64(0.5), "steps": (1, 2.5), "place": Path("runs"), 3: math.nan}
    wanted = {"noise": None, "loss": 0.5, "steps": [1, 2.5], "place": "runs", "3": None}
    assert json.loads(to_json(report)) == wanted


OUT_OF_MEMORY = "Traceback (most recent call last):\n  File x\n    line\ntorch.OutOfMemoryError: 2 GiB\n"


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
        # A program that says nothing behind "error:" was an IndexError of the tool.
        (None, "error: \n\n", "exit code 3"),
        ("", "error: \n\nValueError: no data\n", "ValueError: no data"),
        # A handled exception hid the one that ended the rank, and so did the ranks that lost it.
        (None, "ImportError: no flash_attn, without it\n" + OUT_OF_MEMORY, "torch.OutOfMemoryError: 2 GiB"),
        (
            None,
            "".join(f"[1]<stderr>:{line}\n" for line in ("ImportError: none", *OUT_OF_MEMORY.splitlines()))
            + "[0]<stderr>:RuntimeError: Connection closed by peer\nRuntimeError: a process exited\n",
            "torch.OutOfMemoryError: 2 GiB",
        ),
        (
            None,
            "".join(f"[rank1]: {line}\n" for line in OUT_OF_MEMORY.splitlines()) + "RuntimeError: gone\n",
            "torch.OutOfMemoryError: 2 GiB",
        ),
        (
            None,
            f"{OUT_OF_MEMORY}Exception ignored in: <function Loader.__del__>\nTraceback (most recent call last):\n"
            "  File x\nAttributeError: it is gone\n",
            "torch.OutOfMemoryError: 2 GiB",
        ),
    ],
)
def test_failure_reason_is_one_line(message: str | None, output: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "output").write_text(output)
    if message is not None:
        (tmp_path / "error.json").write_text(json.dumps({"message": {"message": message}}))
    assert why_it_failed(tmp_path, 3) == reason


def test_ranks_with_unequal_steps_are_named(tmp_path: Path) -> None:
    """They were told that they had taken none."""
    folder = tmp_path / "log" / FOLDER
    folder.mkdir(parents=True)
    for rank, steps in enumerate((30, 31)):
        np.savez(folder / f"rank-{rank}.npz", step=np.arange(steps))
    assert why_it_failed(tmp_path, 0).startswith("ranks took 30 and 31 steps: give each as many batches")
    np.savez(folder / "rank-1.npz", step=np.arange(30))
    assert why_it_failed(tmp_path, 0) == "it took no optimizer step that counts"


def test_locked_folder_ends_what_a_killed_command_left(tmp_path: Path) -> None:
    """A job lives on when its command is killed, and must not disturb the next one's.

    So does that of another tool, which `migrate --prove` starts in a folder of its own.
    """
    left = [subprocess.Popen(["sleep", "60"], env={MARK: str(tmp_path / inner)}) for inner in ("", "parity")]
    with locked_folder(tmp_path, "compare") as folder:
        assert folder == tmp_path
        assert None not in [process.poll() for process in left]


def fill_and_append(disk: Path) -> None:
    with locked_folder(disk, "compare") as folder:
        with suppress(OSError):
            (folder / "filler").write_bytes(bytes(5 * 2**20))
        append_run(folder, RunRecord({}, 0, "done", 1.0))


def test_disk_that_fills_up_is_one_sentence(small_disk: Path) -> None:
    """It was a traceback, where the record of a run or a page was written."""
    expected = re.escape(f"--out {small_disk} cannot be written to any more: [Errno 28] No space left")
    with pytest.raises(OptionError, match=expected):
        fill_and_append(small_disk)


def test_folders_inside_are_removed_only_if_they_are_the_tools(tmp_path: Path) -> None:
    """A user may have put something into the folder of a tool, and a kill may have left half of a folder."""
    out = tmp_path / "out"
    with locked_folder(out, "compare"):
        make_inner(out / "running")
        (out / "running" / "log").mkdir()
    assert not (out / "running").exists()
    for name in ("running", "failed"):
        (out / name).mkdir()
        (out / name / "notes").write_text("of the user")
    with pytest.raises(OptionError, match="running was not made by this tool"), locked_folder(out, "compare"):
        pass
    (out / "running").rename(out / "elsewhere")
    with locked_folder(out, "compare"):
        with pytest.raises(OptionError, match="failed was not made by this tool"):
            TrialRunner(out, resume=False)
        with pytest.raises(OptionError, match="failed was not made by this tool"):
            TrialRunner(out).run(trial_of(FAILED))
    assert (out / "failed" / "notes").read_text() == (out / "elsewhere" / "notes").read_text() == "of the user"


def test_start_of_a_job_leaves_its_words_as_they_are(tmp_path: Path) -> None:
    """A script may have options like those of a Trainer job; what a tool wants is in the message."""
    script = tmp_path / "train.py"
    script.write_text("import torch\n")
    words = (str(script), "--log-dir", "here", "--epochs", "2")
    assert read_job(words) == words
    log = tmp_path / "log"
    trial = MeasuredTrial(job=words, engine="ddp", ranks=2, steps=7, exchange=False, options={"batch_size": 8})
    start = trial.start(log)
    run = ["-m", "hvd_trainer", "run", "--backend", "ddp", "--exactly-horovod", "--", *words]
    assert start.command[-len(run) - 2 :] == ["--nproc-per-node", "2", *run]
    assert Message.read(start.variables) == Message(
        log_dir=str(log), engine="ddp", max_steps=7, endless=True, exchange=False, options={"batch_size": 8}
    )


def test_threads_of_the_environment_are_another_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search took the runs that another number of threads had made."""
    keys = set()
    for threads in ("1", "2"):
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
        keys |= {MeasuredTrial(job=("train.py",), engine="ddp", ranks=2).key}
    assert len(keys) == 2


def trial_of(
    code: str, read: Callable[[Path], Mapping[str, Any] | None] = lambda log: {"step_s": 0.1}, **identity: Any
) -> CodeTrial:
    """Return a trial that executes Python code."""
    return CodeTrial("python", identity, lambda log: Start([sys.executable, "-c", code]), read)


DONE, FAILED = "pass", "import sys; sys.exit('no such <file>')"
SLOW = (
    "import subprocess, time; "
    "child = subprocess.Popen(['sleep', '60'], start_new_session=True); print(child.pid, flush=True); "
    "time.sleep(60)"
)


@pytest.mark.parametrize(
    ("limits", "note"),
    [
        ({"limit_s": 2.0}, "had not ended after 2 s (--timeout-s)"),
        ({"limit_s": 2.0, "limit_option": "--limit-s", "budget_s": 900.0}, "had not ended after 2 s (--limit-s)"),
        ({"limit_s": 9.0, "budget_s": 0.0}, "had not ended after 1 s (--budget-s)"),
    ],
)
def test_trial_runner_kills_a_run_past_its_limit(tmp_path: Path, limits: dict[str, Any], note: str) -> None:
    """A launcher's ranks may have sessions of their own, which must end, too."""
    ended = TrialRunner(tmp_path, **limits).run(trial_of(SLOW))
    assert (ended.state, ended.note) == ("killed", note)
    child = int((tmp_path / ended.output).read_text())
    status = Path(f"/proc/{child}/status")
    assert not status.exists() or "zombie" in status.read_text()
    assert not (tmp_path / "running").exists()


def test_trial_runner_repeats_no_run_that_came_to_its_end(tmp_path: Path) -> None:
    """A run that fails is tried again by the same command, and one whose reader refuses it is not recorded."""

    def refuse(log: Path) -> Mapping[str, Any]:
        raise OptionError("refused")

    first = TrialRunner(tmp_path)
    assert first.run(trial_of(DONE), 1).state == "done"
    assert first.run(trial_of(FAILED), 2).note == "exit code 1"
    with pytest.raises(OptionError, match="refused"):
        first.run(trial_of(DONE, refuse), 3)
    assert TrialRunner(tmp_path).has_failed(trial_of(DONE))
    second = TrialRunner(tmp_path)
    assert second.run(trial_of(FAILED), 1).state == "done"
    assert second.run(trial_of(DONE), 2).state == "done"
    assert [number for number, _ in second.to_do([trial_of(DONE)], 3)] == [3]
    assert not TrialRunner(tmp_path, resume=False).last
    assert read_runs(tmp_path) == []


def test_trial_runner_keeps_the_log_folder_of_a_failed_run(tmp_path: Path) -> None:
    """A tool may read it, such as the stacks of a job that hung."""

    def start(log: Path) -> Start:
        return Start([sys.executable, "-c", f"import os, sys; os.makedirs({str(log)!r}); sys.exit(3)"])

    run = TrialRunner(tmp_path).run(CodeTrial("", {}, start, lambda log: None), keep=tmp_path / "kept")
    assert (run.state, (tmp_path / "kept").is_dir()) == ("failed", True)


@pytest.mark.parametrize(
    ("before", "text"),
    [
        (["-m", "hvd_trainer", "run", "--"], "import sys; sys.exit('no data here')"),
        ([], "import sys, hvd_trainer as h; h.run_job(h.TrainerOptions, lambda _: sys.exit('no data here'), [])"),
    ],
)
def test_text_with_which_a_job_exits_is_why_it_failed(before: list[str], text: str, tmp_path: Path) -> None:
    """The tools said "exit code 1"."""
    script = tmp_path / "train.py"
    script.write_text(text)
    start = Start([sys.executable, *before, str(script)])
    run = TrialRunner(tmp_path / "out").run(CodeTrial("", {}, lambda _: start, lambda _: None))
    assert (run.state, run.note) == ("failed", "no data here")


def test_runs_know_their_go_and_what_was_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = TrialRunner(tmp_path)
    first.warn("other programs are at work")
    first.warn("other programs are at work")
    assert capsys.readouterr().err == "warning: other programs are at work\n"
    for number in (1, 2):
        first.run(trial_of(DONE), number)
    TrialRunner(tmp_path).run(trial_of(DONE), 3)
    one, two, three = read_runs(tmp_path)
    assert one.go == two.go < three.go
    assert (one.warnings, three.warnings) == (("other programs are at work",), ())


def test_a_run_that_diverged_is_kept(tmp_path: Path) -> None:
    """JSON has no NaN: its record was left out like a damaged one, and each command made the run again."""
    work = {"on_trainer": True, "steps": 1, "rates": [[0.1, 1]]}
    figures = {"work": work, "first_step_at": 1.0, "step_s": 0.1, "train_loss": math.nan, "last_loss": math.inf}
    TrialRunner(tmp_path).run(trial_of(DONE, lambda log: figures))
    runner = TrialRunner(tmp_path, are_figures=are_figures)
    assert runner.is_done({}, 1)
    (result,) = TrialResult.collect([trial_of(DONE)], list(runner.last.values()))
    assert (result.median("step_s"), result.median("train_loss"), result.median("last_loss")) == (0.1, None, None)


def test_run_all_gives_up_what_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = trial_of(DONE, n=1), trial_of(FAILED, n=2)
    runner = TrialRunner(tmp_path)
    done = [run.state for _, run in runner.run_all(runner.to_do([good, bad], 2), describe=lambda run: "well")]
    assert done == ["done", "failed", "done"]
    first, second, third = capsys.readouterr().out.splitlines()
    assert first.startswith("1/4  round 1, python: well, about ")
    assert second.startswith("2/4  round 1, python: failed: exit code 1, about ")
    assert third == "4/4  round 2, python: well"
    assert len(runner.to_do([good, bad], 3, retry_failed=False)) == 1


def test_programs_that_use_no_core_are_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """The load of the machine was told, which is that of the tool's own trials in the minutes before."""
    monkeypatch.setattr("os.getloadavg", lambda: (9.0, 9.0, 9.0))
    monkeypatch.setattr(machine, "WATCH_S", 0.1)
    monkeypatch.setattr(machine, "cpu_ids", lambda: [0, 1])
    for used, warning in ((0.0, ""), (0.3, "other programs keep 2.0 of 2 cores busy here")):
        seconds = iter([100.0, 100.0 + used])
        monkeypatch.setattr(machine, "cpu_seconds", lambda *_, seconds=seconds: next(seconds))
        assert machine.busy_warning().partition(":")[0] == warning


@pytest.mark.parametrize("shell", ["salloc_interactive", "pals_2_nodes", "torchrun_2", "pytorchjob_v1"])
def test_run_is_no_rank_of_what_the_tool_was_started_by(
    shell: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an interactive shell of Slurm a run of one process was refused: half of a step's variables were left."""
    for name, value in environments.CASES[shell][0].items():
        monkeypatch.setenv(name, value)
    with launched(Start([sys.executable, "-c", SLOW], threads=3), tmp_path, tmp_path / "output") as process:
        while len(find_processes(tmp_path)) < 2:
            time.sleep(0.01)
        environment = psutil.Process(process.pid).environ()
        assert (environment[MARK], environment["OMP_NUM_THREADS"]) == (str(tmp_path), "3")
        assert detect(environment) == World()
    assert not find_processes(tmp_path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "Name the job behind --"),
        (["-m"], "Name the job behind --"),
        (["--epochs", "1"], "begin with the job"),
        (["nowhere.py"], "there is no such file. A module is named by -m: -- -m nowhere.py"),
        (["-m", "nowhere.job"], "-m nowhere.job: there is no such module"),
        (["-m", ".job"], "-m .job: there is no such module"),
    ],
)
def test_read_job_refuses_impossible_jobs(words: Sequence[str], message: str) -> None:
    with pytest.raises(OptionError) as caught:
        read_job(words)
    assert message in str(caught.value)


def test_read_job_accepts_python_in_front(tmp_path: Path) -> None:
    job = ("-m", "hvd_trainer.mnist", "--epochs", "1")
    for python in ("python", "python3", sys.executable):
        assert read_job([python, *job]) == job
    script = tmp_path / "python_loop.py"
    script.touch()
    assert read_job([str(script), "--epochs", "1"]) == (str(script), "--epochs", "1"), "it was taken for Python"
    for python in ("python3.13t", "python3.14d", "python3-dbg"):
        assert read_job([python, *job]) == job
    with pytest.raises(OptionError, match="not UTF-8"):
        read_job([str(script), "--data", "caf\udce9"])


def recorded(seconds: Sequence[Sequence[Sequence[float]]]) -> list[dict[str, Any]]:
    """Return steps of ranks: by rank and step, seconds of data, forward, backward, collective, step, rest."""
    return [{"seconds": np.array(its)} for its in seconds]


def test_speed_tells_exchange_from_straggler() -> None:
    quick = [[0.0, 1.0, 1.0, 5.0, 1.0, 0.0]] * 3
    slow = [[3.0, 1.0, 1.0, 2.0, 1.0, 0.0]] * 3
    warm = [[9.0] * 6]
    figures = speed(recorded([[*warm, *quick], [*warm, *slow]]), np.full(4, 8), 1)
    assert figures["parts"]["exchange"] == 2.0
    assert figures["parts"]["straggler"] == 1.5
    assert figures["parts"]["data"] == 1.5
    assert sum(figures["parts"].values()) == figures["step_s"] == 8.0
    assert figures["samples_per_s"] == 1.0
    assert figures["computing_s"] == [3.0, 6.0]
    assert speed(recorded([quick]), np.full(3, 8), 3) == {}


def test_two_steps_have_typical_figures() -> None:
    """Neither lay between the quartiles of both: the means of no steps were NaN."""
    two = [[0.0, 1.0, 1.0, 0.0, 1.0, 0.0], [0.0, 1.0, 3.0, 0.0, 1.0, 0.0]]
    assert speed(recorded([two]), np.full(2, 8), 0)["typical"]["step_s"] == 4.0


def test_last_loss_is_that_of_ranks_that_have_one() -> None:
    nan = float("nan")
    losses = ([nan, nan, nan, nan], [4.0, 3.0, nan, 1.0])
    ranks = [{"loss": np.array(its)} for its in losses]
    assert last_loss(ranks) == 1.0
    assert last_loss([{"loss": np.arange(1000.0)}]) == 997.0
    assert last_loss([{"loss": np.full(3, nan)}]) is None
