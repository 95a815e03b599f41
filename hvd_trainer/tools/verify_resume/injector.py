"""Start jobs and kill their processes, by the steps and phases that ranks publish in `faults/shared_status.py`."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from hvd_trainer.errors import LaunchError
from hvd_trainer.faults.shared_status import SharedStatus
from hvd_trainer.launch.world import detect
from hvd_trainer.tools.runner.processes import Start, find_processes, launched

START_S, END_S, SETTLE_S = 180.0, 600.0, 10.0
MAX_MISSED_STEPS = 8
"""Steps in which a phase is waited for; some last a few microseconds, and may be missed."""
POLL_S = 5e-5
"""Seconds between two looks at the phase: short beside most phases; without a pause it would take a whole core."""
MAX_START_DELAY_S = 3.0
"""Kills before the training come within this time after a rank's process appears."""
JOB = "hvd_trainer.tools.verify_resume.audit_job"


@dataclass
class RunningJob:
    """A job that was started by `running_job`."""

    launcher: subprocess.Popen[bytes]
    folder: Path

    def error(self, what: str) -> LaunchError:
        """Return an exception that says what the job did, and what it printed."""
        said = (self.folder / "output").read_text(errors="replace")
        return LaunchError(f"The job {what}:\n{said[-2000:]}")

    def finish(self, limit_s: float) -> None:
        """Wait for the job's end.

        Raises:
            LaunchError: it failed, or takes too long.
        """
        try:
            code = self.launcher.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise self.error(f"had not ended after {limit_s:g} s") from None
        if code != 0:
            raise self.error(f"ended with code {code}")

    def wait_until(
        self, is_so: Callable[[], bool], what: str, *, limit_s: float = START_S, interval_s: float = 5e-4
    ) -> None:
        """Ask again and again until the answer is yes.

        Raises:
            LaunchError: the limit is over, or the job has ended: it `what`, such as `made no step`.
        """
        deadline = time.monotonic() + limit_s
        while not is_so():
            if time.monotonic() > deadline or self.launcher.poll() is not None:
                raise self.error(what)
            time.sleep(interval_s)

    def processes(self) -> list[psutil.Process]:
        """Return all processes of the job but the launcher."""
        return [process for process in find_processes(self.folder) if process.pid != self.launcher.pid]

    def kill(self, rank: int | None) -> None:
        """Kill a rank, by the number of its process, or the launcher."""
        with suppress(ProcessLookupError):
            os.kill(self.launcher.pid if rank is None else rank, signal.SIGKILL)

    def left_behind(self) -> int:
        """Wait for the job's end after a kill, and return how many processes outlive the launcher by some seconds;
        and the launcher, if it does not end at all.
        """
        with suppress(subprocess.TimeoutExpired):
            self.launcher.wait(START_S)
        deadline = time.monotonic() + SETTLE_S
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.02)
        return len(left) + (self.launcher.poll() is None)


@contextmanager
def running_job(start: Start, folder: Path) -> Iterator[RunningJob]:
    """Start a job in a folder; all its processes are ended when the context is closed."""
    folder.mkdir(parents=True, exist_ok=True)
    with launched(start, folder, folder / "output") as launcher:
        yield RunningJob(launcher, folder)


@dataclass
class Kill:
    """A planned kill, and what followed it."""

    place: str
    """a phase, `write` for the background write of a checkpoint, or `launcher`"""
    rank: int
    step: int
    """steps that must be done before; after the kill: that were done"""
    moment: float
    """from 0 to 1: the fraction of the start, where that is the place"""
    at: float = 0.0
    """by `time.monotonic`"""
    left_behind: int = 0
    recovery_s: float = 0.0
    """from the kill to the next finished step"""


class FaultInjector:
    """Watches the ranks of a job, and kills as planned."""

    def __init__(self, job: RunningJob, size: int) -> None:
        self._job, self._size = job, size
        self._statuses: dict[int, SharedStatus] = {}
        self._ranks: dict[int, psutil.Process] = {}

    def wait_for_a_step(self) -> float:
        """Wait until rank 0 has finished a step since this start, and return the time, by `time.monotonic`."""
        self._find_ranks(need_statuses=True)
        status = self._statuses[0]
        self._job.wait_until(lambda: status.read()[1] != "start", "made no step")
        first, _ = status.read()
        self._job.wait_until(lambda: status.read()[0] > first, "made no step")
        return time.monotonic()

    def inject(self, kill: Kill) -> None:
        """Kill as planned, wait until all processes have ended, and note in `kill` what has happened.

        Raises:
            LaunchError: the job does not come to the step.
        """
        self._find_ranks(need_statuses=kill.place != "start")
        if kill.place == "start":
            time.sleep(kill.moment * MAX_START_DELAY_S)
        else:
            self._wait_for_place(kill)
        rank = self._ranks[kill.rank].pid
        status = self._statuses.get(kill.rank) or SharedStatus.find(rank)
        self._job.kill(None if kill.place == "launcher" else rank)
        kill.at = time.monotonic()
        kill.step, phase = (0, "start") if status is None else status.read()
        if kill.place not in ("write", "launcher"):
            kill.place = phase  # the planned one may have passed when the signal came
        kill.left_behind = self._job.left_behind()

    def _wait_for_place(self, kill: Kill) -> None:
        planned = kill.step

        def is_there() -> bool:
            step, phase = self._statuses[kill.rank].read()
            if step < planned or self._is_at(kill.place, phase):
                return step >= planned
            if missed := step >= planned + MAX_MISSED_STEPS:
                kill.place = phase
            return missed

        what = f"did not come to step {planned}"
        self._job.wait_until(is_there, what, limit_s=END_S, interval_s=POLL_S)

    def _is_at(self, place: str, phase: str) -> bool:
        if place == "write":
            with suppress(OSError):
                return any(name.startswith(".step") for name in os.listdir(self._job.folder / "checkpoints"))
            return False
        return place in (phase, "launcher")

    def _find_ranks(self, *, need_statuses: bool) -> None:
        """Wait for the ranks' processes, and for the shared status that they open after the rendezvous."""

        def are_there() -> bool:
            for process in self._job.processes():
                with suppress(psutil.Error, LaunchError):
                    world = detect(process.environ())
                    if world.size == self._size and JOB in process.cmdline():
                        self._ranks[world.rank] = process
            if need_statuses:
                found = {rank: SharedStatus.find(process.pid) for rank, process in self._ranks.items()}
                self._statuses = {rank: status for rank, status in found.items() if status is not None}
            return len(self._statuses if need_statuses else self._ranks) == self._size

        if len(self._statuses) < self._size:
            self._job.wait_until(are_there, "did not start")
