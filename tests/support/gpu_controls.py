"""What checks do to a GPU beside training on it; `pretend.device` has the same functions for the pretend one."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

HOLD_CYCLES = 3_000_000_000
"""About 1.5 s of an H200: longer than what is checked meanwhile takes."""


class Held:
    """A stream that is busy, and free again in a while."""

    def reach(self) -> None:
        """Do nothing: nobody can stop the kernel."""


def run_in_order(name: str) -> None:
    """Let kernels give the same bits in every run, whichever stream is late: on a GPU no test can choose that."""
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)


def hold(index: int) -> Held:
    """Stop the current stream of a GPU for a while."""
    import torch

    with torch.cuda.device(index):
        torch.cuda._sleep(HOLD_CYCLES)
    return Held()


def on_host_wait(call: Callable[[str], None]) -> None:
    """From now on call this with the reason each time that the host waits for the GPU."""
    import torch

    def show(message: Any, *rest: Any) -> None:
        if "synchronizing" in str(message):
            call("synchronizes")

    warnings.simplefilter("always")
    warnings.showwarning = show
    torch.cuda.set_sync_debug_mode("warn")


def num_late_writes() -> int:
    """Return 0: only the pretend device notices a write to memory that was freed."""
    return 0
