"""Kill a job at a chosen step and phase, which its ranks publish in shared memory (`faults/shared_status.py`)."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import psutil

from hvd_trainer.errors import LaunchError
from hvd_trainer.faults.shared_status import SharedStatus
from hvd_trainer.launch.world import detect
from hvd_trainer.tools.runner.runs import end_processes, find_processes, start

START_S, END_S, SETTLE_S = 180.0, 600.0, 10.0
MAX_MISSED_STEPS = 8
"""Steps in which a phase is waited for; some last a few microseconds, and may be missed."""
POLL_S = 5e-5
"""Seconds between two looks at the phase: short beside most phases; without a pause it would take a whole core."""
MAX_START_DELAY_S = 3.0
"""Kills before the training come within this time after a rank's process appears."""


class PlannedKill(NamedTuple):
    """The process to kill, and the moment."""

    place: str
    """a phase, `write` for the background write of a checkpoint, or `launcher`"""
    rank: int
    step: int
    """steps that must be done before"""
    moment: float
    """from 0 to 1: the fraction of the start, where that is the place"""


@dataclass
class Kill:
    """A kill, and what followed it."""

    rank: int | None
    place: str
    step: int
    at: float
    """by `time.monotonic`"""
    left_behind: int = 0
    """processes that had not ended some seconds after the launcher, and the launcher if it had not ended at all"""
    recovery_s: float = 0.0
    """from the kill to the next finished step"""


class FaultInjector:
    """Starts a job and kills its processes as planned; all of them are ended when the context is closed."""

    def __init__(self, command: Sequence[str], folder: Path, size: int) -> None:
        self._size, self._folder = size, folder
        folder.mkdir(parents=True, exist_ok=True)
        self._output = folder / "output"
        self._launcher = start(command, folder, self._output)
        self._statuses: dict[int, SharedStatus] = {}
        self._ranks: dict[int, psutil.Process] = {}

    def __enter__(self) -> FaultInjector:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None) -> None:
        end_processes(self._folder)
        self._launcher.wait()
        for status in self._statuses.values():
            status.close()

    def output(self) -> str:
        """Return what the job has printed."""
        return self._output.read_text(errors="replace")

    def finish(self) -> None:
        """Wait for the job's end.

        Raises:
            LaunchError: it failed, or takes too long.
        """
        try:
            code = self._launcher.wait(END_S)
        except subprocess.TimeoutExpired:
            raise LaunchError(f"The job had not ended after {END_S:g} s:\n{self.output()[-2000:]}") from None
        if code != 0:
            raise LaunchError(f"The job ended with code {code}:\n{self.output()[-2000:]}")

    def wait_for_a_step(self) -> float:
        """Wait until rank 0 has finished a step since this start, and return the time, by `time.monotonic`."""
        self._find_ranks(need_statuses=True)
        status = self._statuses[0]
        first = None
        for _ in self._poll(START_S, "made no step"):
            step, phase = status.read()
            if first is None:
                first = None if phase == "start" else step
            elif step > first:
                break
        return time.monotonic()

    def inject(self, planned: PlannedKill) -> Kill | None:
        """Kill as planned, and wait until all processes have ended; return None if the job ended by itself before.

        Raises:
            LaunchError: the job does not come to the step.
        """
        if planned.place == "start":
            self._find_ranks(need_statuses=False)
            kill_at = time.monotonic() + planned.moment * MAX_START_DELAY_S
            while time.monotonic() < kill_at and not self._trains(planned.rank):
                time.sleep(0.001)
            return self._kill(planned.rank, "start")
        self._find_ranks(need_statuses=True)
        status = self._statuses[planned.rank]
        deadline = time.monotonic() + END_S
        while self._launcher.poll() is None:
            if time.monotonic() > deadline:
                said = self.output()[-2000:]
                raise LaunchError(f"The job did not come to step {planned.step} in {END_S:g} s:\n{said}")
            step, phase = status.read()
            # A phase that is not seen in so many steps is given up.
            missed = step >= planned.step + MAX_MISSED_STEPS
            if missed or (step >= planned.step and self._is_at(planned.place, phase)):
                place = phase if missed and planned.place == "write" else planned.place
                return self._kill(None if planned.place == "launcher" else planned.rank, place)
            time.sleep(POLL_S)
        return None

    def _trains(self, rank: int) -> bool:
        status = self._statuses.get(rank) or SharedStatus.find(self._ranks[rank].pid)
        if status is None:
            return False
        self._statuses[rank] = status
        return status.read()[1] != "start"

    def _is_at(self, place: str, phase: str) -> bool:
        if place == "write":
            with suppress(OSError):
                return any(name.startswith(".step") for name in os.listdir(self._folder / "checkpoints"))
            return False
        return place in (phase, "launcher")

    def _kill(self, rank: int | None, place: str) -> Kill:
        victim = self._launcher if rank is None else self._ranks[rank]
        with suppress(psutil.Error):
            victim.send_signal(signal.SIGKILL)
        now = time.monotonic()
        status = self._statuses.get(rank or 0)
        step, phase = (0, "start") if status is None else status.read()
        # The phase may have passed when the signal came.
        kill = Kill(rank, place if place in ("write", "launcher") else phase, step, now)
        with suppress(subprocess.TimeoutExpired):
            self._launcher.wait(START_S)
        gone = time.monotonic() + SETTLE_S
        while self._processes() and time.monotonic() < gone:
            time.sleep(0.02)
        kill.left_behind = len(self._processes()) + (self._launcher.poll() is None)
        return kill

    def _find_ranks(self, *, need_statuses: bool) -> None:
        """Wait for the ranks' processes, and for the shared status that they open after the rendezvous."""
        if len(self._statuses) == self._size:
            return
        for _ in self._poll(START_S, "did not start"):
            for process in self._processes():
                with suppress(psutil.Error, LaunchError):
                    world = detect(process.environ())
                    if (
                        world.size == self._size
                        and "hvd_trainer.tools.verify_resume.audit_job" in process.cmdline()
                    ):
                        self._ranks[world.rank] = process
            if need_statuses:
                found = {rank: SharedStatus.find(process.pid) for rank, process in self._ranks.items()}
                self._statuses = {rank: status for rank, status in found.items() if status is not None}
            if len(self._statuses if need_statuses else self._ranks) == self._size:
                return

    def _poll(self, limit_s: float, what: str) -> Iterator[None]:
        """Yield a few thousand times a second.

        Raises:
            LaunchError: the limit is over, or the job has ended.
        """
        deadline = time.monotonic() + limit_s
        while True:
            if time.monotonic() > deadline or self._launcher.poll() is not None:
                raise LaunchError(f"The job {what}:\n{self.output()[-2000:]}")
            yield
            time.sleep(0.0005)

    def _processes(self) -> list[psutil.Process]:
        """Return all processes of the job but the launcher."""
        return [process for process in find_processes(self._folder) if process.pid != self._launcher.pid]
