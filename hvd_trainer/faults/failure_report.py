"""The report of a failed job: one short text on stderr, printed by one rank; longer output goes to files.

A rank whose error is the consequence of another one's waits for that report.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hvd_trainer.faults.root_cause import Facts, Heartbeat, call_text

if TYPE_CHECKING:
    # It imports PyTorch, and `run_job` reports mistyped options without.
    from hvd_trainer.rendezvous.ranks import RankInfo

STALL = "no progress, and the job continues"
CRASH_EXIT_CODE = 1
"""The exit code of a rank that failed."""
GRACE_S = 10.0
"""How long a rank whose error another one reports waits before it exits."""


class FailureReporter:
    """Prints failure reports of this process, and knows whether its job's failure has been reported already.

    There is one per process (`reporter`): `run_job`, which prints errors at the end of the process, and the engine
    inside the job, whose monitor prints reports, have nothing else in common.

    Attributes:
        prints_tracebacks: include tracebacks of this process in its reports: `run_job` keeps Python from printing
            them.
        parent_reports: leave reports to the parent process, as `hvd_trainer.run` does for its children.
        has_reported: True once a report on this job was printed, by this rank or another one.
    """

    def __init__(self) -> None:
        self.prints_tracebacks = self.parent_reports = False
        self.has_reported = False

    def start_job(self) -> None:
        """Forget reports on an earlier job of this process."""
        self.has_reported = False

    def report(self, text: str) -> None:
        """Write the report of the job's failure to stderr: the first one, where two sessions watch the same ranks.

        A Trainer that joins a script's group under `run` has a session beside that of the script.
        """
        if not self.has_reported:
            self.has_reported = True
            self.write(text)

    def write(self, text: str) -> None:
        """Write to stderr by one system call, so that output of other ranks does not cut it in two."""
        with suppress(OSError):
            os.write(2, text.encode(errors="replace"))


reporter = FailureReporter()


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The failure that ends a job; or a stall after which it continues."""

    title: str = "failure"
    rank: int
    peers: Sequence[RankInfo]
    """all ranks"""
    heartbeat: Heartbeat
    """the rank's last one"""
    what: str
    """what happened, in one line"""
    detail: str = ""
    """traceback or stack"""
    others: Sequence[str] = ()
    """one line for each other rank, where that helps"""
    folder: str = ""
    """where the stacks of all ranks are"""
    is_last_known: bool = False
    """whether step and phase are from the rank's last heartbeat and may be outdated"""

    def text(self) -> str:
        """Return the report as complete lines."""
        peer = self.peers[self.rank]
        who = f"rank {self.rank} of {len(self.peers)} on {peer.host} (process {peer.pid})"
        where = describe_position(self.heartbeat)
        if self.is_last_known:
            outside = self.heartbeat.phase in ("start", "trained")
            where = f"last heard of {where}" if outside else f"last heard of in {where}"
        lines = [f"{self.title}: {who}, {where}: {self.what}"]
        lines += [self.detail.rstrip()] if self.detail else []
        lines += self.others
        lines += [f"stacks of all ranks: {self.folder}"] if self.folder else []
        return "\n".join(lines) + "\n"


def describe_position(heartbeat: Heartbeat) -> str:
    """Return a rank's position as reports have it, such as `step 41, forward`."""
    match heartbeat.phase:
        case "start":
            return "before the first step"
        case "trained":
            return f"after step {heartbeat.step:,}, outside of fit"
        case phase:
            return f"step {heartbeat.step + 1:,}, {phase}"


def describe_rank(rank: int, heartbeat: Heartbeat, facts: Facts, line: str) -> str:
    """Return a rank's position, for how long it has been there, and what it waits in.

    Args:
        line: of the user's own code; empty if unknown.
    """
    how = "waits" if heartbeat.is_waiting else "busy"
    seconds = heartbeat.seconds + heartbeat.silent_s
    where = f"{describe_position(heartbeat)}, {how} for {seconds:.0f} s{call_text(rank, facts)}"
    return f"rank {rank}: {where}{', at ' if line else ''}{line}"


def save_stacks(folder: Path, stacks: Mapping[int, str], report: str | None) -> None:
    """Write the stacks of some ranks, and a report; errors are ignored, since the report must still be printed."""
    files = {f"rank-{rank}.txt": text for rank, text in stacks.items()}
    if report is not None:
        files["report.txt"] = report
    for name, text in files.items():
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)


def report_folder(log_folder: str | None, token: str) -> Path:
    """Return the folder for a report's files: in the log folder, else a temporary one, alike on all ranks."""
    if log_folder is None:
        # Other users see the name of a temporary folder: the hash tells them nothing of the token.
        name = hashlib.sha256(token.encode()).hexdigest()[:12]
        return Path(tempfile.gettempdir()) / f"hvd_trainer-{name}"
    return Path(log_folder).expanduser() / "failures"


def write_torchrun_error(text: str, environ: Mapping[str, str]) -> None:
    """Write the error file that torchrun prints as the root cause; to be called by the rank that failed."""
    file = environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        # torchrun takes the error with the earliest timestamp, in whole seconds, for the root cause.
        more = {"py_callstack": text, "timestamp": str(int(time.time()) - 1)}
        message = {"message": text, "extraInfo": more}
        with suppress(OSError):
            Path(file).write_text(json.dumps({"message": message}))


def wait_for_launcher(seconds: float = GRACE_S) -> None:
    """Wait for the launcher to end this process; return after a time if it does not.

    All launchers end every rank at the first bad exit code, some within milliseconds. A rank whose error is the
    consequence of another one's must not exit first, or that one is killed before it has printed its report. If no
    other rank fails within that time, this rank has to report its own error.
    """
    threading.Event().wait(seconds)
