"""Waiting for Horovod's operations.

With `ASYNC_COMPLETION` an operation on an accelerator is done once it is in the device's queue, and the device's
default stream waits for its end (why that suffices: `horovod_reducer`). After `follow` the current one does, too.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar

from hvd_trainer.utils import accelerator
from hvd_trainer.utils.tensors import tensors_in

T = TypeVar("T")

PAUSE_S = 100e-6
"""How long to sleep between two polls of a Horovod that `install-horovod` has not built."""
MAX_WAIT_S = 0.1
"""How long to wait for an operation before asking whether another rank has failed."""
SPIN_S = 50e-6
"""How long to poll without a pause where that is worth a core: a thread that sleeps is woken 50 us late, and on an
accelerator the next step's first operations wait for it."""

ASYNC_COMPLETION = {"HOROVOD_ENABLE_ASYNC_COMPLETION": "1"}
"""For Horovod on NCCL. Without it the host waits, and queues the update and the next step when the GPU is idle."""

WaitDone = Callable[[int, float], int]
"""Wait until Horovod has completed more than so many operations, or so many seconds; return how many."""


def _sleep(seen: int, limit_s: float) -> int:
    if seen >= 0:
        time.sleep(min(limit_s, PAUSE_S))
    return 0


def completes_asynchronously(hvd: Any) -> bool:
    """Return whether a Horovod exchanges this machine's tensors by NCCL, in the device's own queue."""
    return accelerator.kind() in accelerator.HOROVOD and bool(hvd.nccl_built())


def follow(received: T) -> T:
    """Let the current stream wait for what Horovod's `synchronize` has returned, and return it."""
    for tensor in tensors_in(received):
        if not accelerator.is_host(tensor.device):
            accelerator.follow_default_stream(tensor)
    return received


class Waiter:
    """Wait for Horovod's operations without holding the CPU, and not for ever.

    Horovod's own wait has no limit: its stall check neither warned nor ended anything when a rank was stuck.

    Args:
        timeout_s: of `wait` and `result`.
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
        self._wait_done: WaitDone = getattr(hvd.mpi_ops.mpi_lib, "horovod_torch_wait_done", _sleep)

    def is_done(self, handle: int) -> bool:
        """Return whether `take` would return at once."""
        return bool(self._hvd.poll(handle))

    def take(self, handle: int) -> Any:
        """Return the result of an operation that is done."""
        return follow(self._hvd.synchronize(handle))

    def result(self, handle: int) -> Any:
        """Wait for an operation and return its result; errors as of `wait`."""
        self.wait(handle)
        return self.take(handle)

    def wait(self, handle: int) -> None:
        """Wait for an operation, and leave its result to whoever asks for it next.

        Raises:
            TimeoutError: the other ranks did not take part in time.
            Exception: what `check` raises.
        """
        if not self.until(functools.partial(self.is_done, handle), self._timeout_s):
            raise TimeoutError(
                f"The other ranks did not take part in an exchange within {self._timeout_s:g} s: one of them "
                f"is stuck, or much slower. If that is meant, raise --startup-timeout-s"
            )

    def until(self, is_done: Callable[[], bool], timeout_s: float) -> bool:
        """Ask whenever an operation is completed whether something is done; return False if it is not in time.

        Args:
            is_done: becomes true when Horovod completes an operation.
        """
        began = time.monotonic()
        seen = self._wait_done(-1, 0.0)  # before the question: what is completed after it ends the wait
        while not is_done():
            waited = time.monotonic() - began
            if waited < self._spin_s:
                continue
            self._check()
            if waited > timeout_s:
                return False
            seen = self._wait_done(seen, min(MAX_WAIT_S, max(0.0, timeout_s - waited) + PAUSE_S))
        return True
