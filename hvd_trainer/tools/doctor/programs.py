"""Run checks side by side in threads, and programs with a time limit that are all gone at the end."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import IO, TypeVar

from hvd_trainer.errors import LaunchError

T = TypeVar("T")

MARGIN_S = 0.5
"""A program is killed this long before the checks' deadline, so that its check can still report it."""
DRAIN_S = 0.2
"""The time to read the remaining output of a killed program."""


@dataclass(frozen=True)
class Answer:
    """The output of a program."""

    code: int | None
    """the exit code; None: its time was up"""
    out: str
    err: str

    @property
    def last_line(self) -> str:
        """The last line of stderr, or of stdout where stderr is empty; else how the program ended."""
        lines = [line.strip() for line in (self.err.strip() or self.out.strip()).splitlines() if line.strip()]
        if self.code is None:
            return "no answer in time"
        return lines[-1] if lines else f"exit code {self.code}"


class Programs:
    """The programs that the checks start; none of them outlives the `with` block.

    Args:
        environ: the environment of the programs.
        deadline: when all of them must have ended, by `time.monotonic`.
    """

    def __init__(self, environ: Mapping[str, str], deadline: float) -> None:
        self._environ, self._deadline = environ, deadline
        self._running: set[subprocess.Popen[str]] = set()
        self._lock = threading.Lock()
        self._closed = False

    def __enter__(self) -> Programs:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None) -> None:
        with self._lock:
            self._closed = True
            left = list(self._running)
        for process in left:
            self.end(process)

    @property
    def program_left_s(self) -> float:
        """The time that a program may still take, in seconds."""
        return max(0.0, self.check_left_s - MARGIN_S)

    @property
    def check_left_s(self) -> float:
        """The time that a check may still take, in seconds."""
        return max(0.0, self._deadline - time.monotonic())

    def find(self, name: str) -> str | None:
        """Find a program on PATH, or where Linux keeps those of the administrator; None if there is none."""
        path = os.pathsep.join([self._environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
        return shutil.which(name, path=path)

    def ask(self, *command: str, limit_s: float | None = None) -> Answer:
        """Run a program to its end, or kill it when its time is up, and return its output.

        Args:
            limit_s: in seconds, if not until the deadline.
        """
        process = self.start(command, stderr=subprocess.PIPE)
        late = False
        try:
            out, err = process.communicate(
                timeout=self.program_left_s if limit_s is None else min(limit_s, self.program_left_s)
            )
        except subprocess.TimeoutExpired:
            late = True
            self.end(process)
            out, err = "", ""
            # A process that left the group may hold the pipes open for ever.
            with suppress(subprocess.TimeoutExpired):
                out, err = process.communicate(timeout=DRAIN_S)
        self.end(process)
        return Answer(None if late else process.returncode, out, err)

    def start(
        self, command: Sequence[str], *, stderr: int | IO[str], stdin: int = subprocess.DEVNULL
    ) -> subprocess.Popen[str]:
        """Start a program that `end` ends.

        Raises:
            LaunchError: the `with` block has ended.
        """
        with self._lock:
            if self._closed:
                raise LaunchError("the time is up")
            process = subprocess.Popen(
                command,
                env=dict(self._environ),
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                errors="replace",
                start_new_session=True,
            )
            self._running.add(process)
        return process

    def end(self, process: subprocess.Popen[str]) -> None:
        """Kill a program with its process group, unless it has ended."""
        with self._lock:
            self._running.discard(process)
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
