"""End all that the ranks have started when their job ends, also if the job's command was killed by SIGKILL.

    command ---- guard ---- rank 0 ---- what it starts
                        |-- rank 1
                        `-- processes whose parents have ended

Linux gives the children of a process that has ended to the nearest subreaper above it, which is the guard, or the
command if the guard is killed; and it sends the guard a signal when the command has ended.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from hvd_trainer.faults.failure_report import GRACE_S

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def run_guarded(start_ranks: Callable[[], int]) -> int:
    """Call a function that starts ranks in the guard, a fork of this process; return its exit code in both.

    To be called while this process has one thread and no other children.
    """
    command = os.getpid()
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    guard = os.fork()
    if guard == 0:
        # A terminal sends it to all, and the command tells the guard.
        signal.signal(signal.SIGINT, lambda *_: None)
        _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        _prctl(PR_SET_CHILD_SUBREAPER, 1)
        return start_ranks() if os.getppid() == command else 128 + signal.SIGTERM
    for ending in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(ending) is not signal.SIG_IGN:  # as under nohup
            signal.signal(ending, lambda number, _: os.kill(guard, number))
    try:
        status = os.waitpid(guard, 0)[1]
    except KeyboardInterrupt:
        os.kill(guard, signal.SIGTERM)
        os.waitpid(guard, 0)
        raise
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return code  # only daemons are left
    _end_all(psutil.Process().children())
    return 128 - code


class Orphans:
    """The guard's children that it has not started: their parents, below the ranks, have ended.

    Args:
        own: numbers of the processes that the guard has started.
    """

    def __init__(self, own: Collection[int]) -> None:
        self._own, self._daemons = {*own}, set[int]()
        self._children = Path(f"/proc/self/task/{os.getpid()}/children")

    def list(self) -> set[int]:
        """Return their numbers, and forget those that have ended."""
        with suppress(OSError):  # some kernels have no such file
            children = {int(child) for child in self._children.read_text().split()} - self._own
            return {child for child in children if os.waitpid(child, os.WNOHANG)[0] == 0}
        return set()

    def spare_daemons(self, orphans: Collection[int]) -> None:
        """Let those live on that a running rank has made daemons: of another session, and left by their parent.

        A session alone is no sign: programs put what they start and wait for into one, to end it as a whole.
        """
        for child in {*orphans} - self._daemons:
            with suppress(ProcessLookupError):
                if os.getsid(child) != os.getsid(0):
                    self._daemons.add(child)

    def end(self) -> None:
        """End them and all that they have started, but for daemons."""
        spared = self._own | self._daemons
        _end_all([child for child in psutil.Process().children() if child.pid not in spared])


def _end_all(processes: Sequence[psutil.Process]) -> None:
    """End processes and all that they have started."""
    below: list[psutil.Process] = []
    for process in processes:
        with suppress(psutil.Error):
            below += process.children(recursive=True)
    end_processes([*processes, *below])


def end_processes(processes: Sequence[psutil.Process]) -> None:
    """End processes: by SIGTERM, and by SIGKILL if that takes too long."""
    for process in processes:
        with suppress(psutil.Error):
            process.terminate()
    alive = psutil.wait_procs(processes, GRACE_S)[1]
    for process in alive:
        with suppress(psutil.Error):
            process.kill()
    # A rank that frees much GPU memory takes a while to end.
    psutil.wait_procs(alive, GRACE_S)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
