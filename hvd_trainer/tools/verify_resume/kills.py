"""Kill a run at a random moment: a rank stops after a random number of steps, and from there on

a rank, the launcher    is killed after a random time
a save                  is waited for, for as many steps again: the process that saves ends inside it by itself
                        (`measure/save_kill.py`)
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import psutil

from hvd_trainer.errors import LaunchError
from hvd_trainer.launch.world import detect
from hvd_trainer.measure.recorders import MARK
from hvd_trainer.measure.save_kill import Saves
from hvd_trainer.measure.start import find_processes
from hvd_trainer.measure.steps import FIRST_STEP

T = TypeVar("T")
Who = Literal["rank", "launcher", "save"]
END_S, AFTER_KILL_S, SETTLE_S, POLL_S, SAVE_S = 3600.0, 180.0, 45.0, 0.005, 20.0


class Killed(NamedTuple):
    """A start that was killed: by which process, when, and which processes it left behind."""

    victim: str
    steps: int
    """at least, before it was killed"""
    first_step_s: float
    """from the start to the end of its first step"""
    left: int
    """processes that have outlived the launcher by some seconds, and the launcher, if it did not end"""
    saving: str = ""
    """the file that it was writing; empty if it was no save"""

    def __str__(self) -> str:
        return f"{self.victim} killed" + (f" inside a save of {self.saving}" if self.saving else "")


class EndedError(LaunchError):
    """A run has ended by itself before it was killed."""


class Kill(NamedTuple):
    """A kill to come, at some time after a rank has made so many steps."""

    who: Who
    """a rank, the launcher, or what is inside the next save of as many steps again"""
    rank: int
    steps: int
    moment: float
    """seconds after these steps; of a save, the fraction of the file that is written"""

    @property
    def stop_at(self) -> tuple[int, ...]:
        """The rank that stops, and after how many steps, each time."""
        return (self.rank, self.steps, *([2 * self.steps] if self.who == "save" else []))

    def strike(self, saves: Saves, place: Path, folder: Path, process: subprocess.Popen[bytes]) -> dict[str, Any]:
        """Kill a run, wait for its end, and return the fields of `Killed`; empty if it has ended before.

        Args:
            place: of the run.
            folder: by which `find_processes` finds its processes.
            process: the launcher's.
        """
        began, log = time.time(), place / "log"
        stops = partial(stopped, log / MARK.format(self.steps))
        with suppress(EndedError):
            victim, saving = _wait_for(stops, process), ""
            ranks = {other.pid: rank_of(other.pid, self.rank) for other in find_processes(folder)}
            if self.who == "save":
                saves.arm(self.moment)
                os.kill(victim, signal.SIGCONT)
                again = partial(stopped, log / MARK.format(2 * self.steps))
                _wait_for(lambda: saves.hit() or again(), process)
                if hit := saves.disarm():
                    victim, file = hit
                    # One that lives on has saved less than before, and was not inside.
                    saving = file if has_ended(victim, SAVE_S) else ""
            else:
                os.kill(victim, signal.SIGCONT)
                time.sleep(self.moment)
                victim = process.pid if self.who == "launcher" else victim
            with suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
            name = "the launcher" if victim == process.pid else f"rank {ranks.get(victim, self.rank)}"
            left = _count_left(folder, process)
            first_step_s = (log / FIRST_STEP).stat().st_mtime - began
            return Killed(name, self.steps, first_step_s, left, saving)._asdict()
        return {}


def _wait_for(is_so: Callable[[], T | None], process: subprocess.Popen[bytes]) -> T:
    """Wait for something in a run.

    Raises:
        EndedError: the run has ended without it, or hangs.
    """
    deadline, has_ended = time.monotonic() + END_S, False
    while not (value := is_so()):  # looked at again after the end: it may have come to it by that
        if has_ended:
            raise EndedError
        has_ended = time.monotonic() > deadline or process.poll() is not None
        time.sleep(POLL_S)
    return value


def _count_left(folder: Path, process: subprocess.Popen[bytes]) -> int:
    """Return how many processes of a run live some seconds after the kill."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(AFTER_KILL_S)
    settle = time.monotonic() + SETTLE_S
    while left := {other.pid for other in find_processes(folder)} - {process.pid}:
        if time.monotonic() > settle:
            break
        time.sleep(POLL_S)
    return len(left) + (process.poll() is None)


def stopped(mark: Path) -> int | None:
    """Return the process that has left this mark, if it has stopped."""
    if not mark.exists():
        return None
    pid = int(mark.read_text())
    with suppress(psutil.Error):  # one that has ended is told as the launcher's end
        return pid if psutil.Process(pid).status() == psutil.STATUS_STOPPED else None
    return None


def has_ended(pid: int, limit_s: float) -> bool:
    """Wait for the end of a process for so many seconds, and return whether it has come."""
    deadline = time.monotonic() + limit_s
    with suppress(psutil.Error):
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
    return True


def rank_of(pid: int, default: int) -> int:
    """Return the rank of a process by its environment; `default` if it cannot be read."""
    with suppress(psutil.Error, LaunchError):
        return detect(psutil.Process(pid).environ()).rank
    return default
