"""A running launch: its ranks, its output, its end, and the check that nothing is left of it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import process_tree
import psutil
import warm_client
from waiting import PATIENCE_S

REPORT = re.compile(r"^(?:\[\d\]<stderr>:)?(failure: rank .*)$", re.MULTILINE)
"""The first line of a failure report."""
SETTLE_S = 10.0
"""Seconds that ranks may take to vanish after their launcher, before they count as left behind."""


class LaunchError(RuntimeError):
    """A launch went wrong; the message has the command and what it printed."""


class LaunchTimeoutError(LaunchError):
    """A launch did not end in time; the message also has its processes and its Python ranks' stacks."""


class OrphanError(LaunchError):
    """The launcher ended and something that it had started did not."""


def _send(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


@dataclass(frozen=True)
class Result:
    """How a launch ended; ``seconds`` from its start to the end of the launcher's own process."""

    returncode: int
    stdout: str
    stderr: str
    seconds: float


class Job:
    """A running launch. Made by :func:`launchers.start`, which also ends it.

    Args:
        command: the launcher's command line.
        argv: its end, what the ranks' Python gets.
        mark: found in the environment of everything that the launch starts.
        folder: for the output.
    """

    def __init__(
        self, command: list[str], argv: list[str], *, mark: str, folder: Path, env: Mapping[str, str], cwd: Path
    ) -> None:
        self._command = command
        self._argv = argv
        self._mark = mark
        self._stdout, self._stderr = folder / "stdout", folder / "stderr"
        with self._stdout.open("wb") as out, self._stderr.open("wb") as err:
            self._started = time.monotonic()
            # Files, not pipes: a pipe's reader waits as long as any orphan holds the other end.
            self.popen = subprocess.Popen(
                command, env=env, cwd=cwd, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
            )

    @property
    def stdout(self) -> str:
        """Return what was printed so far, by all ranks together."""
        return self._stdout.read_text(errors="replace")

    @property
    def stderr(self) -> str:
        """Return the errors printed so far, by all ranks and the launcher together."""
        return self._stderr.read_text(errors="replace")

    def processes(self) -> list[psutil.Process]:
        """Return everything alive that this launch started, the launcher included."""
        return process_tree.with_descendants(process_tree.marked(self._mark))

    def ranks(self, count: int) -> list[psutil.Process]:
        """Wait for ``count`` ranks; return their Python processes, ordered by pid (not by rank).

        psutil's waiting takes the exit code of plain ``python`` away from :meth:`wait`.

        Raises:
            LaunchTimeoutError: fewer than that after `PATIENCE_S`.
        """
        deadline = time.monotonic() + PATIENCE_S
        while len(found := self._ranks()) < count:
            if time.monotonic() > deadline:
                raise LaunchTimeoutError(self.report(f"{len(found)} of {count} ranks came up"))
            time.sleep(0.05)
        return found

    def _ranks(self) -> list[psutil.Process]:
        found = {process.pid: process for process in self.processes() if self._is_rank(process)}
        # A forked child, such as a data loader's worker, has its parent's command line.
        top = [process for process in found.values() if process.ppid() not in found]
        return sorted(top, key=lambda process: process.pid)

    def _is_rank(self, process: psutil.Process) -> bool:
        """Return whether this is Python with exactly the ranks' arguments; torchrun adds -u to them."""
        try:
            if process.name() == warm_client.NAME:
                return False  # its stand-in
            program, *arguments = process.cmdline()
        except (psutil.NoSuchProcess, ValueError):
            return False
        while arguments[-1:] == [""]:  # room to spare, see warm_server.py
            arguments.pop()
        if arguments[:1] == ["-u"]:
            arguments = arguments[1:]
        return Path(program).name.startswith("python") and arguments == self._argv

    def wait_for_output(self, text: str, *, count: int = 1) -> None:
        """Wait until ``text`` was printed ``count`` times, so that a test knows where the ranks are.

        Raises:
            LaunchTimeoutError: not printed in time.
            LaunchError: the launcher ended without printing it.
        """
        deadline = time.monotonic() + PATIENCE_S
        while True:
            ended = self.popen.poll() is not None
            if self.stdout.count(text) >= count:
                return
            if ended:
                raise LaunchError(self.report(f"ended without printing {text!r} {count} times"))
            if time.monotonic() > deadline:
                raise LaunchTimeoutError(self.report(f"no {text!r} {count} times in {PATIENCE_S:g} s"))
            time.sleep(0.05)

    def press_ctrl_c(self, *, times: int = 1) -> None:
        """Send SIGINT to the launcher's process group, as a terminal does.

        srun only says that it heard the first one and ends at a second within a second.
        """
        os.killpg(self.popen.pid, signal.SIGINT)
        for _ in range(times - 1):
            time.sleep(0.3)
            os.killpg(self.popen.pid, signal.SIGINT)

    def wait(self, timeout_s: float = PATIENCE_S) -> Result:
        """Wait for the launcher's end.

        Raises:
            LaunchTimeoutError: it did not end.
        """
        try:
            returncode = self.popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            processes = f"processes:\n{process_tree.describe(self.processes())}"
            self._ask_for_stacks()
            report = self.report(f"did not end in {timeout_s:g} s", processes)
            raise LaunchTimeoutError(report) from None
        return Result(returncode, self.stdout, self.stderr, time.monotonic() - self._started)

    def _ask_for_stacks(self) -> None:
        """Send SIGABRT to each rank, which prints the stacks of all its threads and ends.

        One rank after the other, with the launcher stopped meanwhile: ranks that share an output would
        write into each other's lines, and a launcher that sees one rank end kills the others.
        """
        ranks = self._ranks()
        others = [process for process in self.processes() if process not in ranks]
        _send(others, signal.SIGSTOP)
        for rank in ranks:
            _send([rank], signal.SIGABRT)
            process_tree.wait_for_end([rank], limit_s=2)
        _send(others, signal.SIGCONT)
        # What they printed still has to come through the launcher.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(2)

    def report(self, what: str, *details: str) -> str:
        """Return ``what`` happened, the command, the details, and the end of the output."""
        out, err = (text[-8000:] or "(nothing)" for text in (self.stdout, self.stderr))
        head = f"{what}: {' '.join(self._command)}"
        return "\n".join([head, *details, f"stdout:\n{out}", f"stderr:\n{err}"])

    def check_nothing_left(self) -> None:
        """Give the ranks a few seconds to end after their launcher.

        Raises:
            OrphanError: something is still there.
        """
        deadline = time.monotonic() + SETTLE_S
        while left := self.processes():
            if time.monotonic() > deadline:
                what = f"the launcher ended, and {SETTLE_S:g} s later these processes had not"
                raise OrphanError(self.report(what, process_tree.describe(left)))
            process_tree.wait_for_end(left, limit_s=0.1)

    def destroy(self) -> None:
        """Kill whatever is left, at once."""
        process_tree.kill_all_marked(self._mark)
        self.popen.wait()
