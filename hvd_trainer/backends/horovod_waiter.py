"""Waiting for Horovod's operations."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

MIN_PAUSE_S = 50e-6
MAX_PAUSE_S = 200e-6
SPIN_S = 50e-6
"""How long to poll without a pause where that is worth a core: a sleep takes the system 50 us longer than asked
for, and on an accelerator the next step's first operations wait for it."""


def poll_until(
    is_done: Callable[[], bool],
    timeout_s: float,
    *,
    spin_s: float = 0.0,
    check: Callable[[], None] = lambda: None,
) -> bool:
    """Ask until something is done, with pauses; return False if it is not in time.

    Args:
        spin_s: how long to ask without a pause.
        check: called between two questions; what it raises ends the wait.
    """
    began, pause = time.monotonic(), MIN_PAUSE_S
    while not is_done():
        waited = time.monotonic() - began
        if waited < spin_s:
            continue
        check()
        if waited > timeout_s:
            return False
        time.sleep(pause)
        pause = min(1.25 * pause, MAX_PAUSE_S)
    return True


class Waiter:
    """Wait for Horovod's operations without holding the CPU, and not for ever.

    Horovod's own wait spins, so that with more ranks than cores it takes the time that it waits for, and it has
    no limit: its stall check neither warned nor ended anything when a rank was stuck.

    Args:
        hvd: `horovod.torch`.
        timeout_s: how long one operation may take.
        spin_s: how long to poll without a pause: `SPIN_S` where the work is an accelerator's, 0 on CPUs.
        check: called between two polls; raises when the operation cannot end because another rank has failed.
    """

    def __init__(
        self,
        hvd: ModuleType,
        timeout_s: float,
        *,
        spin_s: float = 0.0,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._hvd, self._timeout_s, self._spin_s, self._check = hvd, timeout_s, spin_s, check

    def result(self, handle: int) -> Any:
        """Wait for an operation and return its result.

        Raises:
            TimeoutError: as `wait`, which also raises what `check` does.
        """
        self.wait(handle)
        return self._hvd.synchronize(handle)

    def wait(self, handle: int) -> None:
        """Wait for an operation, and leave its result to whoever asks for it next.

        Raises:
            TimeoutError: the other ranks did not take part in time.
            Exception: what `check` raises.
        """
        poll = self._hvd.poll
        if not poll_until(lambda: poll(handle), self._timeout_s, spin_s=self._spin_s, check=self._check):
            raise TimeoutError(
                f"The other ranks did not take part in an exchange within {self._timeout_s:g} s: one of them "
                f"is stuck, or much slower. If that is meant, raise --startup-timeout-s"
            )
