"""A job that is watched from outside and killed at a chosen moment: in which step and phase, its pages tell."""

from __future__ import annotations

import os
import secrets
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

MARK = "HVD_TRAINER_VERIFY"
START_S, END_S, SETTLE_S = 180.0, 600.0, 10.0
AIM_STEPS = 8
POLL_S = 5e-5
"""Short beside most phases; without a pause it would take a whole core from the ranks."""
START_UP_S = 3.0
"""Kills before training strike within so many seconds of a rank's appearing."""


class Plan(NamedTuple):
    """Whom to kill, and when."""

    place: str
    """a phase, `write` for the background write of a checkpoint, or `launcher`"""
    rank: int
    step: int
    """not before so many steps are done"""
    moment: float
    """from 0 to 1: how far into the start, where that is the place"""


@dataclass
class Hit:
    """A kill, and what followed."""

    rank: int | None
    place: str
    step: int
    at: float
    """by `time.monotonic`"""
    left_behind: int = 0
    """processes that had not ended some seconds after the launcher, and the launcher if it had not ended at all"""
    recovery_s: float = 0.0
    """from the kill to the next finished step"""


class RunningJob:
    """A started job. Nothing of it is left after the `with` block."""

    def __init__(self, command: Sequence[str], folder: Path, size: int) -> None:
        self._size, self._folder = size, folder
        self._mark = secrets.token_hex(8)
        folder.mkdir(parents=True, exist_ok=True)
        self._output = folder / "output"
        with self._output.open("ab") as output:
            self._launcher = subprocess.Popen(
                command,
                env={**os.environ, MARK: self._mark},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._pages: dict[int, SharedStatus] = {}
        self._ranks: dict[int, psutil.Process] = {}

    def __enter__(self) -> RunningJob:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None) -> None:
        for process in self._processes():
            with suppress(psutil.Error):
                process.kill()
        self._launcher.kill()
        self._launcher.wait()
        for page in self._pages.values():
            page.close()

    def output(self) -> str:
        """What it has printed."""
        return self._output.read_text(errors="replace")

    def finish(self) -> None:
        """Waits for its end.

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
        """Returns when rank 0 has finished a step in this start; the time, by `time.monotonic`."""
        self._find_ranks(need_pages=True)
        page = self._pages[0]
        first = None
        for _ in self._patiently(START_S, "made no step"):
            step, phase = page.read()
            if first is None:
                first = None if phase == "start" else step
            elif step > first:
                break
        return time.monotonic()

    def hunt(self, plan: Plan) -> Hit | None:
        """Kills as planned, and waits until all have ended; None if the job ended by itself before.

        Raises:
            LaunchError: the job does not come to the step.
        """
        if plan.place == "start":
            self._find_ranks(need_pages=False)
            strike = time.monotonic() + plan.moment * START_UP_S
            while time.monotonic() < strike and not self._trains(plan.rank):
                time.sleep(0.001)
            return self._kill(plan.rank, "start")
        self._find_ranks(need_pages=True)
        page = self._pages[plan.rank]
        deadline = time.monotonic() + END_S
        while self._launcher.poll() is None:
            if time.monotonic() > deadline:
                said = self.output()[-2000:]
                raise LaunchError(f"The job did not come to step {plan.step} in {END_S:g} s:\n{said}")
            step, phase = page.read()
            # Some phases last a few microseconds: one that is not caught in so many steps is let go.
            missed = step >= plan.step + AIM_STEPS
            if missed or (step >= plan.step and self._is_at(plan.place, phase)):
                place = phase if missed and plan.place == "write" else plan.place
                return self._kill(None if plan.place == "launcher" else plan.rank, place)
            time.sleep(POLL_S)
        return None

    def _trains(self, rank: int) -> bool:
        page = self._pages.get(rank) or SharedStatus.find(self._ranks[rank].pid)
        if page is None:
            return False
        self._pages[rank] = page
        return page.read()[1] != "start"

    def _is_at(self, place: str, phase: str) -> bool:
        if place == "write":
            with suppress(OSError):
                return any(name.startswith(".step") for name in os.listdir(self._folder / "checkpoints"))
            return False
        return place in (phase, "launcher")

    def _kill(self, rank: int | None, place: str) -> Hit:
        victim = self._launcher if rank is None else self._ranks[rank]
        with suppress(psutil.Error):
            victim.send_signal(signal.SIGKILL)
        now = time.monotonic()
        page = self._pages.get(rank or 0)
        step, phase = (0, "start") if page is None else page.read()
        # What was aimed at may have passed when the signal came.
        hit = Hit(rank, place if place in ("write", "launcher") else phase, step, now)
        with suppress(subprocess.TimeoutExpired):
            self._launcher.wait(START_S)
        gone = time.monotonic() + SETTLE_S
        while self._processes() and time.monotonic() < gone:
            time.sleep(0.02)
        hit.left_behind = len(self._processes()) + (self._launcher.poll() is None)
        return hit

    def _find_ranks(self, *, need_pages: bool) -> None:
        """Waits for the ranks' processes, and for the pages that they open when they have met."""
        if len(self._pages) == self._size:
            return
        for _ in self._patiently(START_S, "did not start"):
            for process in self._processes():
                with suppress(psutil.Error, LaunchError):
                    world = detect(process.environ())
                    if (
                        world.size == self._size
                        and "hvd_trainer.tools.verify_resume.audit_job" in process.cmdline()
                    ):
                        self._ranks[world.rank] = process
            if need_pages:
                found = {rank: SharedStatus.find(process.pid) for rank, process in self._ranks.items()}
                self._pages = {rank: page for rank, page in found.items() if page is not None}
            if len(self._pages if need_pages else self._ranks) == self._size:
                return

    def _patiently(self, limit_s: float, what: str) -> Iterator[None]:
        """Yields a few thousand times a second.

        Raises:
            LaunchError: for too long, or the job has ended.
        """
        deadline = time.monotonic() + limit_s
        while True:
            if time.monotonic() > deadline or self._launcher.poll() is not None:
                raise LaunchError(f"The job {what}:\n{self.output()[-2000:]}")
            yield
            time.sleep(0.0005)

    def _processes(self) -> list[psutil.Process]:
        """All of the job but the launcher itself."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.pid != self._launcher.pid and process.environ().get(MARK) == self._mark:
                    found.append(process)
        return found
