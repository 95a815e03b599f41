"""Keep a record of each run that a tool has made: a line in runs.jsonl of its folder."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from hvd_trainer.errors import OptionError
from hvd_trainer.utils.files import open_regular

RUNS = "runs.jsonl"
MAX_LINE_BYTES = 2**26
"""The largest line of runs.jsonl that is read. The learning rates of a million steps take 30 MB."""


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
    go: float = 0.0
    """when the command began that made it, which tells those runs that ran in turn from others"""
    warnings: tuple[str, ...] = ()
    """what the command had warned of until then"""

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
