"""The report of a failed job: one, short, from a single place; what is longer lies in files."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

CRASH = 1
"""The exit code of a rank that failed."""
_state = {"told": False, "takes tracebacks": False}


def take_tracebacks() -> None:
    """From now on the report has the traceback of what this process raises, because Python will not print it."""
    _state["takes tracebacks"] = True


def takes_tracebacks() -> bool:
    """Whether `take_tracebacks` was called."""
    return _state["takes tracebacks"]


def tell(text: str) -> None:
    """Prints the report, in one piece."""
    hear()
    with suppress(OSError):
        os.write(2, text.encode(errors="replace"))


def hear() -> None:
    """The report has been printed, here or by another rank."""
    _state["told"] = True


def forget() -> None:
    """Another job of this process begins."""
    _state["told"] = False


def was_told() -> bool:
    """Whether a report has been printed on this process's job, so that nobody need say more."""
    return _state["told"]


@dataclass(frozen=True)
class Failure:
    """Why a job ends."""

    rank: int
    size: int
    host: str
    process: int
    step: int
    """steps that were done"""
    phase: str
    what: str
    """what happened, in one line"""
    detail: str = ""
    """traceback or stack"""
    others: Sequence[str] = ()
    """one line for each other rank, where that helps"""
    folder: str = ""
    """where the stacks of all ranks are"""
    heard: bool = False
    """whether step and phase are only what it has last said of itself"""

    def text(self) -> str:
        """The report, whole lines."""
        who = f"rank {self.rank} of {self.size} on {self.host} (process {self.process})"
        where = place(self.step, self.phase)
        if self.heard:
            where = f"last heard of {where}" if self.phase == "start" else f"last heard of in {where}"
        lines = [f"failure: {who}, {where}: {self.what}"]
        lines += [self.detail.rstrip()] if self.detail else []
        lines += self.others
        lines += [f"stacks of all ranks: {self.folder}"] if self.folder else []
        return "\n".join(lines) + "\n"


def place(step: int, phase: str) -> str:
    """Where a rank was, in a few words."""
    return "before the first step" if phase == "start" else f"step {step + 1:,}, {phase}"


def keep(folder: Path, name: str, text: str) -> None:
    """Writes one file of a report. That a folder cannot be written to is no reason to say nothing."""
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def folder_for(log_folder: str | None, token: str) -> Path:
    """Where a report is kept: in the log folder, else in a temporary one that has the same name on all ranks."""
    if log_folder is None:
        # The name is seen by others, and tells them nothing of the token.
        name = hashlib.sha256(token.encode()).hexdigest()[:12]
        return Path(tempfile.gettempdir()) / f"hvd_trainer-{name}"
    return Path(log_folder).expanduser() / "failures"


def tell_torchrun(text: str, environ: Mapping[str, str]) -> None:
    """To be called by the rank that failed: torchrun's last words are what it finds in this file."""
    file = environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        # The earliest is taken for the cause, in whole seconds.
        more = {"py_callstack": text, "timestamp": str(int(time.time()) - 1)}
        message = {"message": text, "extraInfo": more}
        with suppress(OSError):
            Path(file).write_text(json.dumps({"message": message}))
