"""Step, phase and last progress of this rank: the one clock of all time limits. Setting it is cheap."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hvd_trainer.faults.shared_status import SharedStatus

BACKWARD, COLLECTIVE, END = "backward", "collective", "end"
MIN_DEVICE_LAG_S = 1.0
"""The device is asked whether it is in a collective only if the host has made no progress for so long: the
driver's call may block while another thread waits for space in the device's queue."""
LONG_PHASES = ("start", "epoch", "save", "callback", "script")
"""Phases that may take as long as the start: they make loaders and metrics, write files or run a user's code."""


class CollectiveAbortedError(RuntimeError):
    """This rank's collectives were aborted because another rank failed: their results must not be used."""


class Activity:
    """Step and phase of this rank, and the time of its last progress.

    Args:
        startup_s: how long it may send no heartbeat before `step_limit_s` is set, in seconds.

    Attributes:
        step: completed optimizer steps.
        phase: one of `shared_status.PHASES`.
        since: when it last made progress, by `time.monotonic`.
        long_limit_s: how long each of `LONG_PHASES` may take, in seconds; None: no limit.
        step_limit_s: the same for any other phase.
        reports_only: whether the first rank that takes longer is reported, and the job continues.
        warn_wait_s: how long a rank may keep others waiting in a collective before that is reported, in seconds,
            whatever it does meanwhile; 0: no limit. Rank 0's counts; so does `end_wait_s`.
        end_wait_s: the same before the job ends.
        is_exchanging: returns whether the device has an unfinished collective that the host does not wait for.
        listeners: called with each phase that begins; waiting for other ranks is `collective`, in whatever phase.
    """

    def __init__(self, startup_s: float) -> None:
        self._startup_s = startup_s
        self.step, self.phase, self.since = 0, "start", time.monotonic()
        self.long_limit_s: float | None = None
        self.step_limit_s: float | None = None
        self.reports_only = False
        self.warn_wait_s = self.end_wait_s = 0.0
        self.listeners: list[Callable[[str], None]] = []
        self.is_exchanging: Callable[[], bool] = lambda: False
        self._waits = 0
        """how many `waiting` blocks are entered"""
        self._raised_while_waiting = self._raised_while_working = self._aborted = False
        self._status: SharedStatus | None = None

    def share(self) -> int | None:
        """Make step and phase visible to other processes of this machine; return the memory's descriptor."""
        self._status = SharedStatus.create()
        self._status.write(self.step, self.phase)
        return self._status.descriptor

    def close(self) -> None:
        """Undo `share`."""
        status, self._status = self._status, None
        if status is not None:
            status.close()

    def enter(self, phase: str) -> None:
        """Begin another phase, or the next round of the same one.

        Raises:
            CollectiveAbortedError: after `abort`.
        """
        if self._aborted:
            self.check()
        self.phase, self.since = phase, time.monotonic()
        if self._status is not None:
            self._status.write(self.step, phase)
        if self.listeners:
            self._notify(phase)

    def advance(self) -> None:
        """Note progress within a phase."""
        self.since = time.monotonic()

    def finish_step(self, step: int) -> None:
        """Note that so many optimizer steps are completed."""
        self.step = step
        self.enter("step")

    def abort(self) -> None:
        """Make each further `enter`, `check` and end of `waiting` raise; called by another thread."""
        self._aborted = True

    def check(self) -> None:
        """Raise if collectives were aborted: results read from the device since the last phase are invalid then.

        Raises:
            CollectiveAbortedError: after `abort`.
        """
        if self._aborted:
            self._raised_while_waiting = True
            raise CollectiveAbortedError("another rank has failed, and the collective with it was given up")

    def blame_collective(self) -> None:
        """Note that the exception by which this rank ends was raised in a collective, whatever the phase."""
        self._raised_while_waiting = True

    def _notify(self, phase: str) -> None:
        for listener in self.listeners:
            listener(phase)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Mark the block as waiting for other ranks.

        Raises:
            CollectiveAbortedError: after `abort`.
        """
        self._waits += 1
        self.since = time.monotonic()
        self._notify(COLLECTIVE)
        try:
            yield
            self.check()
        except BaseException:
            self._raised_while_waiting = not self._raised_while_working
            raise
        finally:
            self._waits -= 1
            self.since = time.monotonic()
            self._notify(COLLECTIVE if self._waits else self.phase)

    @contextmanager
    def working(self, phase: str) -> Iterator[None]:
        """Mark a block inside of `waiting` as this rank's own work, such as one micro-batch of a pipeline."""
        waits, self._waits = self._waits, 0
        self.enter(phase)
        try:
            yield
        except BaseException:
            self._raised_while_working = True
            raise
        finally:
            self._waits = waits
            self.since = time.monotonic()
            self._notify(COLLECTIVE if waits else phase)

    @property
    def is_waiting(self) -> bool:
        """Whether this rank can make progress only if the others do."""
        if self._waits > 0 or self.phase in (COLLECTIVE, END):
            return True
        return time.monotonic() - self.since > MIN_DEVICE_LAG_S and self.is_exchanging()

    @property
    def in_collective(self) -> bool:
        """Whether an exception that was raised now may be the consequence of another rank's failure."""
        return self._raised_while_waiting or self.phase in (COLLECTIVE, BACKWARD)

    @property
    def limit_s(self) -> float | None:
        """How long it may go without progress; None: no limit."""
        return self.long_limit_s if self.phase in LONG_PHASES else self.step_limit_s

    @property
    def silence_limit_s(self) -> float:
        """How long it may send no heartbeat: the monitor's thread runs in all phases, also in slow ones."""
        return self._startup_s if self.step_limit_s is None else self.step_limit_s
