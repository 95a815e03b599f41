"""Have all ranks act on a request of one rank after the same step, or between two batches of an evaluation.

A signal reaches one rank, clocks differ, and one exchange per step to agree would be too slow. So the ranks poll
each other a few times a second: after every n-th step, where rank 0 computes n by its clock and sends it along.
Over a slow link, where a poll itself takes long, they poll less often.

    step      1  2  3  4  5  6  7  8  9 10 11 ...
    poll      x  x     x           x              n = 1, 2, 4, ... up to what fits into the interval

In an evaluation ranks may have unequal numbers of batches. One that has none left polls at once, and waits there
for the others, until no rank has any.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from hvd_trainer.backends import Backend

INTERVAL_S = 0.5
MAX_INTERVAL_S = 3.0
"""Bounds of the time between two polls, unless one step takes longer: whoever sends SIGTERM usually waits 30 s."""
MAX_POLL_FRACTION = 0.05
"""Fraction of the time that polls may take, unless that would exceed `MAX_INTERVAL_S`. The time that rank 0 waits
for slower ranks counts as well, although it would wait as long in the next exchange without a poll."""


class StepConsensus:
    """Requests by name, which all ranks learn of after the same step.

    Args:
        names: all possible requests, the same on every rank.
        interval_s: seconds between two polls where a poll takes no time; if steps take longer, each is followed by
            one.

    Attributes:
        requested: by this rank, and not yet agreed on.
    """

    def __init__(self, backend: Backend, names: Sequence[str], interval_s: float = INTERVAL_S) -> None:
        self._backend = backend
        self._names = tuple(names)
        self._interval_s = interval_s
        self.requested: set[str] = set()
        self._steps = 1  # between two polls
        self._steps_left = 1
        self._polled_at = time.monotonic()
        self._poll_s = 0.0

    def request(self, name: str) -> None:
        """Make a request of this rank part of the next poll. Safe in a signal handler."""
        self.requested.add(name)

    def poll(self, *, now: bool = False) -> frozenset[str]:
        """Return what any rank has requested; empty after steps without a poll.

        All ranks call it after each step; it is a collective after every n-th.

        Args:
            now: poll whatever the number of the step; for a rank that is the only one, or that has no work left.
        """
        self._steps_left -= 1
        if self._steps_left > 0 and not now:
            return frozenset()
        requested = [name in self.requested for name in self._names]
        next_steps = self._steps_to_next_poll() if self._backend.world.is_first else 0
        began = time.monotonic()
        *by_any_rank, steps = self._backend.collectives.all_reduce_numbers([*requested, next_steps], "max")
        # A rank without work waits for those that have some, and that costs nothing.
        self._poll_s = 0.0 if now else time.monotonic() - began
        self._steps = self._steps_left = int(steps)
        answer = frozenset(name for name, yes in zip(self._names, by_any_rank, strict=True) if yes)
        self.requested -= answer
        return answer

    def _steps_to_next_poll(self) -> int:
        now = time.monotonic()
        step_s = (now - self._polled_at) / self._steps
        self._polled_at = now
        interval_s = max(self._interval_s, min(self._poll_s / MAX_POLL_FRACTION, MAX_INTERVAL_S))
        return max(1, min(2 * self._steps, math.ceil(interval_s / max(step_s, 1e-6))))
