"""How `doctor` waits: checks side by side in threads, programs with a time limit, and nothing left at the end."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Any, TypeVar

from hvd_trainer.errors import LaunchError

T = TypeVar("T")

MARGIN_S = 0.5
"""So long before the time of all is up a program is ended, so that its check can still say so."""
LAST_WORDS_S = 0.2
"""For what an ended program has left to be read."""


@dataclass(frozen=True)
class Answer:
    """What a program has said."""

    code: int | None
    """its exit code; None: its time was up"""
    out: str
    err: str

    @property
    def last_line(self) -> str:
        """Of what it complains about."""
        lines = [line.strip() for line in (self.err.strip() or self.out.strip()).splitlines() if line.strip()]
        if self.code is None:
            return "no answer in time"
        return lines[-1] if lines else f"exit code {self.code}"


class Programs:
    """The programs that the checks start; none of them is left after the `with` block.

    Args:
        environ: their environment.
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
    def left_s(self) -> float:
        """How long a program may still take, in seconds."""
        return max(0.0, self.all_left_s - MARGIN_S)

    @property
    def all_left_s(self) -> float:
        """How long a check may still take."""
        return max(0.0, self._deadline - time.monotonic())

    def find(self, name: str) -> str | None:
        """Where the program is on PATH, or where Linux keeps those of the administrator."""
        path = os.pathsep.join([self._environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
        return shutil.which(name, path=path)

    def ask(self, *command: str, limit_s: float | None = None) -> Answer:
        """Runs a program to its end, or to the end of its time, and returns what it has said.

        Args:
            limit_s: in seconds, if not until the deadline.
        """
        process = self.start(command, stderr=subprocess.PIPE)
        late = False
        try:
            out, err = process.communicate(timeout=self.left_s if limit_s is None else min(limit_s, self.left_s))
        except subprocess.TimeoutExpired:
            late = True
            self.end(process)
            out, err = "", ""
            # What has left its group may hold the pipes, for ever.
            with suppress(subprocess.TimeoutExpired):
                out, err = process.communicate(timeout=LAST_WORDS_S)
        self.end(process)
        return Answer(None if late else process.returncode, out, err)

    def start(
        self, command: Sequence[str], *, stderr: int | IO[str], stdin: int = subprocess.DEVNULL
    ) -> subprocess.Popen[str]:
        """A running program, which `end` ends.

        Raises:
            LaunchError: the time of all is up.
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
        """Ends a program with what it has started in its group; does nothing if it has ended."""
        with self._lock:
            self._running.discard(process)
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def side_by_side(calls: Sequence[Callable[[], T]]) -> list[Future[T]]:
    """Starts all calls, each in a thread of its own: a call that never returns keeps nobody from ending."""
    futures: list[Future[T]] = [Future() for _ in calls]
    for call, future in zip(calls, futures, strict=True):
        threading.Thread(target=_carry_out, args=(call, future), daemon=True).start()
    return futures


def _carry_out(call: Callable[[], Any], future: Future[Any]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:
        future.set_exception(error)
