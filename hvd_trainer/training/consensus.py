"""What one rank wants, all ranks do after the same step.

A signal reaches one rank, a clock is only one rank's, and an exchange per step to agree would cost more than it is
worth. So the ranks ask each other a few times a second: after every n-th step, with n from rank 0's clock, which
sends it along. Where asking itself takes long, over a slow link, they ask less often.

    step      1  2  3  4  5  6  7  8  9 10 11 ...
    asked     x  x     x           x              n = 1, 2, 4, ... up to what fits into the interval
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from hvd_trainer.backends import Backend

INTERVAL_S = 0.5
MAX_INTERVAL_S = 3.0
"""They ask about this often, unless a single step takes longer: who sends SIGTERM waits for 30 s as a rule."""
MAX_POLL_FRACTION = 0.05
"""Of the time, which asking may take unless that would make it too seldom. What rank 0 waits for slower ranks
counts, too; without asking it would wait for them as long in the next exchange."""


class StepConsensus:
    """Wishes by name, agreed on by all ranks.

    Args:
        backend: the engine.
        names: all wishes there can be, the same on every rank.
        interval_s: how often to ask, in seconds, where that takes no time; steps that take longer ask after each.
    """

    def __init__(self, backend: Backend, names: Sequence[str], interval_s: float = INTERVAL_S) -> None:
        self._backend, self._names, self._interval_s = backend, tuple(names), interval_s
        self._wanted: set[str] = set()
        self._steps, self._left = 1, 1
        self._asked = time.monotonic()
        self._took_s = 0.0

    def want(self, name: str) -> None:
        """Says that this rank wants it: the next answer has it on all ranks. Safe in a signal handler."""
        self._wanted.add(name)

    def after_step(self) -> frozenset[str]:
        """To be called after each step, on all ranks: what they want, or nothing when they do not ask yet."""
        self._left -= 1
        if self._left > 0:
            return frozenset()
        wanted = [name in self._wanted for name in self._names]
        steps = self._steps_next() if self._backend.world.is_first else 0
        began = time.monotonic()
        *agreed, most = self._backend.all_reduce_numbers([*wanted, steps], "max")
        self._took_s = time.monotonic() - began
        self._steps = self._left = int(most)
        answer = frozenset(name for name, yes in zip(self._names, agreed, strict=True) if yes)
        self._wanted -= answer
        return answer

    def _steps_next(self) -> int:
        now = time.monotonic()
        per_step, self._asked = (now - self._asked) / self._steps, now
        interval_s = max(self._interval_s, min(self._took_s / MAX_POLL_FRACTION, MAX_INTERVAL_S))
        return max(1, min(2 * self._steps, math.ceil(interval_s / max(per_step, 1e-6))))
