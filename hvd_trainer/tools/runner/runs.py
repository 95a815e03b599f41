"""Run jobs as a user would start them, with a time limit, and keep a record of each run.

DIR/runs.jsonl    one line per run that has ended
DIR/running/      what the present run writes: metrics, weights, output; gone after it
DIR/failed/       the output of each run that failed, by its line in runs.jsonl
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec
import psutil

from hvd_trainer.errors import LaunchError, OptionError
from hvd_trainer.launch.launchers import LAUNCHERS
from hvd_trainer.utils.files import find_unsafe_path, open_regular

T = TypeVar("T")

MARK = "HVD_TRAINER_RUN"
"""The environment variable by which the processes of a run are found; its value is the command's folder. Launchers
put ranks into sessions of their own, which a signal to a process group does not reach."""
END_S = 20.0
RUNS = "runs.jsonl"
MAX_LINE_BYTES = 2**26
"""The largest line of runs.jsonl that is read. The learning rates of a million steps take 30 MB."""
REASONS = (
    r"^(?:\[rank \d+\] )?(?:error|failure): (.*(?:\n[ \t].*)*\n?.*)",  # run_job's
    r"^\S+: error: (.*)",  # argparse's
    r"^\u256d[^\n]*\n\u2502 (.*?) *\u2502$",  # tyro's box
    r"^((?:\w+\.)*\w*(?:Error|Exception): \S.*)",
)
"""Patterns of the lines in which a run's programs state why they failed, the likeliest first."""
TRACEBACK = "Traceback (most recent call last):"


@dataclass(frozen=True)
class RunRecord:
    """The record of one run."""

    identity: Mapping[str, Any]
    """what was run, in plain JSON"""
    round: int
    state: Literal["done", "failed", "killed"]
    """killed: by a signal or the time limit, so that it may succeed another time"""
    seconds: float
    """from start to end"""
    note: str = ""
    """why it failed, in one line"""
    figures: Mapping[str, Any] = field(default_factory=dict)
    output: str = ""
    """the file with what it printed, if it failed"""
    began_at: float = 0.0
    """seconds since 1970"""

    @property
    def key(self) -> str:
        return key_of(self.identity)

    def why(self, folder: Path) -> str:
        """Return why it failed, and where its output is.

        Args:
            folder: that of the tool.
        """
        return self.note + (f"; its output is in {folder / self.output}" if self.output else "")


def in_rounds(plan: Sequence[T], rounds: int) -> Iterator[tuple[int, T]]:
    """Yield (round, trial): each trial once in each round, forwards in one and backwards in the next.

    So each has nearly the same mean position in time, and a drift of the machine favours none.
    """
    for number in range(1, rounds + 1):
        for trial in plan if number % 2 else reversed(plan):
            yield number, trial


def key_of(identity: Mapping[str, Any]) -> str:
    """Return the identity of a trial as text, by which its runs are found again."""
    return json.dumps(identity, sort_keys=True)


@contextmanager
def locked_folder(out: Path) -> Iterator[Path]:
    """Lock the folder of --out for this command while the context is open, and yield its absolute path.

    On exit, whatever runs in the folder is ended.

    Raises:
        OptionError: another one is using it, or it cannot be written to.
    """
    folder = out.expanduser().resolve()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Other folders are removed when the next run begins.
        files = [path.name for path in folder.iterdir() if path.is_symlink() or not path.is_dir()]
        if strange := find_unsafe_path(folder, [*files, "failed"]):
            raise OptionError(f"--out {folder} cannot be written to: {strange}")
        lock = (folder / ".lock").open("w")
    except OSError as error:
        raise OptionError(f"--out {folder} cannot be written to: {error}") from error
    with lock:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise OptionError(
                f"--out {folder}: another one is using it. Wait for its end, or name another folder ({error})"
            ) from None
        # As an exception, so that it does not leave the running job behind.
        before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        try:
            clear(folder)
            yield folder
        finally:
            clear(folder)
            signal.signal(signal.SIGTERM, before)


def read_runs(folder: Path, are_figures: Callable[[Mapping[str, Any]], bool] = bool) -> list[RunRecord]:
    """Return the records of all runs that have ended, in their order; lines that are no records are left out.

    Args:
        folder: that of the tool; it may come from elsewhere, so that a line may hold anything.
        are_figures: whether these can be the figures of a run that is done.

    Raises:
        OptionError: the file cannot be read.
    """
    runs = []
    try:
        with suppress(FileNotFoundError), open_regular(folder / RUNS) as lines:
            while line := lines.readline(MAX_LINE_BYTES):
                with suppress(msgspec.MsgspecError, RecursionError):
                    run = msgspec.json.decode(line, type=RunRecord)
                    if run.state != "done" or are_figures(run.figures):
                        runs.append(run)
    except OSError as error:
        raise OptionError(f"--out {folder}: {RUNS} cannot be read: {error}") from error
    return runs


def append_run(folder: Path, run: RunRecord) -> None:
    """Append the record of a run to runs.jsonl, and wait until it is on the disk."""
    file = folder / RUNS
    with file.open("ab+") as lines:
        torn = lines.tell() > 0 and (lines.seek(-1, os.SEEK_END), lines.read())[1] != b"\n"
        lines.write((("\n" if torn else "") + json.dumps(asdict(run)) + "\n").encode())
        lines.flush()
        os.fsync(lines.fileno())


class Start(NamedTuple):
    """How to start a run."""

    command: Sequence[str]
    variables: Mapping[str, str] = MappingProxyType({})
    """further environment variables"""
    threads: int | None = None
    """of each rank, on the CPU; None: as this process's environment says"""


def run_to_end(start: Start, folder: Path, output: Path, *, limit_s: float) -> int | None:
    """Return the exit code of a program; None if it ran past the limit. All its processes are ended.

    Args:
        start: how to start it.
        folder, output: as in `launched`.
        limit_s: after which it is killed, in seconds.
    """
    with launched(start, folder, output) as process:
        try:
            return process.wait(None if limit_s == math.inf else limit_s)
        except subprocess.TimeoutExpired:
            return None


@contextmanager
def launched(start: Start, folder: Path, output: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a program, and end all its processes at the end of the context.

    Args:
        start: how to start it.
        folder: by which `find_processes` finds its processes.
        output: the file to which what they print is appended.
    """
    # Whatever launcher may have started the tool: its ranks are not those of the run.
    others = {name for launcher in LAUNCHERS for name in launcher.variables()}
    environment = {
        **{name: value for name, value in os.environ.items() if name not in others},
        MARK: str(folder),
        # By itself torchrun gives many ranks one thread each, and a single rank all cores.
        **({} if start.threads is None else {"OMP_NUM_THREADS": str(start.threads)}),
        # torchrun copies there what the failed rank says is the reason.
        "TORCHELASTIC_ERROR_FILE": str(output.with_name("error.json")),
        **start.variables,
    }
    process = None
    try:
        with output.open("ab") as file:
            process = subprocess.Popen(
                start.command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        yield process
    finally:
        if process is not None:
            process.kill()  # it has no environment yet while it is being started
        # Found by their environment: also one whose start a signal has interrupted.
        end_processes(folder)
        if process is not None:
            process.wait()  # or it would stay as a zombie


def running(folder: Path) -> Path:
    """Return the folder into which the present run writes."""
    return folder / "running"


def log_dir(folder: Path) -> Path:
    """Return the log folder of the present run."""
    return running(folder) / "log"


def clear(folder: Path) -> None:
    """Remove the files and end the processes of a run in this folder, also of one whose command was killed."""
    end_processes(folder)
    shutil.rmtree(running(folder), ignore_errors=True)


def end_processes(folder: Path) -> None:
    """Kill all processes of a run in this folder.

    Raises:
        LaunchError: it cannot be killed.
    """
    deadline = time.monotonic() + END_S
    # Again and again: one may start another meanwhile.
    while found := find_processes(folder):
        if time.monotonic() > deadline:
            raise LaunchError(f"These processes of a run do not end: {', '.join(str(p.pid) for p in found)}")
        for process in found:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(found, timeout=0.5)


def find_processes(folder: Path) -> list[psutil.Process]:
    """Return the living processes of a run in this folder."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return [process for process in found if process.pid != os.getpid()]


def why_it_failed(place: Path, code: int) -> str:
    """Return in one line why a run failed: in the words of the failed rank, or else of the launcher."""
    if code == 0:
        return "it ended without having trained: it took no optimizer step"
    with suppress(OSError, ValueError, KeyError, TypeError):
        return _reason(json.loads((place / "error.json").read_text())["message"]["message"])
    # A rank that is alone has no watch over it that would tell torchrun.
    said = (place / "output").read_text(errors="replace")
    said = re.sub(r"^\[\d+\]<std\w+>:", "", said, flags=re.MULTILINE)  # horovodrun's, before each line
    for pattern in REASONS:
        if (match := re.search(pattern, said, re.MULTILINE)) is not None:
            return _reason(match[1])
    return f"exit code {code}"


def _reason(text: str) -> str:
    """Return one line of a report: the exception where there is a traceback, else the first line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if TRACEBACK in text else lines[0]


def keep_output(folder: Path) -> str:
    """Copy what the present run has printed to the folder of failed runs, and return the file's relative path."""
    kept = folder / "failed"
    kept.mkdir(exist_ok=True)
    number = len((folder / RUNS).read_bytes().splitlines()) if (folder / RUNS).exists() else 0
    target = kept / f"{number + 1}.txt"
    shutil.copy(running(folder) / "output", target)
    return str(target.relative_to(folder))
