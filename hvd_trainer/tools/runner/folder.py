"""The folder of a tool, which one command at a time uses, and the record of each run that was made in it.

DIR/runs.jsonl    one line per run that has ended
DIR/running/      what the present run writes: metrics, weights, output; gone after it
DIR/failed/       the output of each run that failed, by its line in runs.jsonl
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from hvd_trainer.errors import OptionError
from hvd_trainer.tools.runner.processes import end_processes, exit_on_sigterm
from hvd_trainer.utils.files import find_unsafe_path, open_regular

RUNS = "runs.jsonl"
MAX_LINE_BYTES = 2**26
"""The largest line of runs.jsonl that is read. The learning rates of a million steps take 30 MB."""


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
        with exit_on_sigterm():
            try:
                clear(folder)
                yield folder
            finally:
                clear(folder)


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
        """Return why it failed, and where its output is."""
        return self.note + (f"; its output is in {folder / self.output}" if self.output else "")


def key_of(identity: Mapping[str, Any]) -> str:
    """Return the identity of a trial as text, by which its runs are found again."""
    return json.dumps(identity, sort_keys=True)


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
