"""What this rank is doing, so that a failure can be told with its step and phase. Cheap to set."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hvd_trainer.faults.shared_status import SharedStatus

EXCHANGE, END = "reduce", "end"
LAGS_S = 1.0
"""From when on it matters why the host does not get on. The driver is not asked before: a call to it may block
while another thread waits for room in the device's queue."""
LONG_PHASES = ("start", "epoch", "save", "callback")
"""What may take as long as the start: loaders as an epoch begins, metrics as it ends, a disk, a user's code."""


class ExchangeAbortedError(RuntimeError):
    """This rank's exchanges were given up because another rank failed: what they have left is of no use."""


class Activity:
    """Step and phase of this rank, and since when.

    Args:
        startup_s: how long it may be silent before it has limits, in seconds.

    Attributes:
        step: optimizer steps that are done.
        phase: one of `page.PHASES`.
        since: when it last got on, by `time.monotonic`.
        limits: how long `LONG_PHASES` may take, and the other ones, in seconds; None: as long as they like.
        was_waiting: whether an exception has come out of a collective.
        is_exchanging: tells whether the device still has an exchange to finish, which the host does not wait for.
        listeners: are told of each phase that begins; waiting for other ranks is `reduce`, whatever it is part of.
    """

    def __init__(self, startup_s: float) -> None:
        self._startup_s = startup_s
        self.step, self.phase, self.since = 0, "start", time.monotonic()
        self.limits: tuple[float, float] | None = None
        self.raised_in_exchange = False
        self.listeners: list[Callable[[str], None]] = []
        self.is_exchanging: Callable[[], bool] = lambda: False
        self._waits, self._failed_alone, self._aborted = 0, False, False
        self._page: SharedStatus | None = None

    def share(self) -> int | None:
        """Lets the other processes of this machine see it; the file descriptor by which they do."""
        made = SharedStatus.create()
        if made is None:
            return None
        self._page, descriptor = made
        self._page.write(self.step, self.phase)
        return descriptor

    def stop_sharing(self, descriptor: int | None) -> None:
        """Takes `show` back."""
        page, self._page = self._page, None
        if page is not None and descriptor is not None:
            page.close()
            os.close(descriptor)

    def enter(self, phase: str) -> None:
        """Another phase begins, or the next round of the same one.

        Raises:
            ExchangeAbortedError: after `abort`.
        """
        self.check()
        self.phase, self.since = phase, time.monotonic()
        if self._page is not None:
            self._page.write(self.step, phase)
        self._tell(phase)

    def abort(self) -> None:
        """Make each further `enter`, `check` and end of `waiting` raise; called by another thread."""
        self._aborted = True

    def check(self) -> None:
        """Raise if what was read from the device since the last phase may be of no use.

        Raises:
            ExchangeAbortedError: after `abort`.
        """
        if self._aborted:
            self.raised_in_exchange = True
            raise ExchangeAbortedError("another rank has failed, and the exchange with it was given up")

    def _tell(self, phase: str) -> None:
        for listener in self.listeners:
            listener(phase)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside, this rank waits for the others.

        Raises:
            ExchangeAbortedError: after `abort`.
        """
        self._waits += 1
        self.since = time.monotonic()
        self._tell(EXCHANGE)
        try:
            yield
            self.check()
        except BaseException:
            self.raised_in_exchange = not self._failed_alone
            raise
        finally:
            self._waits -= 1
            self.since = time.monotonic()
            self._tell(EXCHANGE if self._waits else self.phase)

    @contextmanager
    def working(self, phase: str) -> Iterator[None]:
        """Inside `waiting`: what this rank does by itself meanwhile, such as one chunk of a pipeline."""
        is_waiting, self._waits = self._waits, 0
        self.enter(phase)
        try:
            yield
        except BaseException:
            self._failed_alone = True
            raise
        finally:
            self._waits = is_waiting
            self.since = time.monotonic()
            self._tell(EXCHANGE if is_waiting else phase)

    @property
    def is_waiting(self) -> bool:
        """Whether this rank can only get on when the others do."""
        if self._waits > 0 or self.phase in (EXCHANGE, END):
            return True
        return time.monotonic() - self.since > LAGS_S and self.is_exchanging()

    @property
    def in_exchange(self) -> bool:
        """Whether the exception on its way may be another rank's doing."""
        return self.raised_in_exchange or self.phase in (EXCHANGE, "backward")

    @property
    def limit_s(self) -> float | None:
        """How long it may be without getting on."""
        return None if self.limits is None else self.limits[self.phase not in LONG_PHASES]

    @property
    def silence_limit_s(self) -> float:
        """How long a rank may be silent: even in the slowest phases the watch has its turn."""
        return self._startup_s if self.limits is None else self.limits[1]
