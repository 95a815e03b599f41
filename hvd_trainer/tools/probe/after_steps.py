"""End a script after so many optimizer steps, or hold a rank of it, so that a tool can kill it at that step."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from torch.optim.optimizer import Optimizer

from hvd_trainer.tools.probe.script_events import ScriptListener
from hvd_trainer.utils.files import atomic_write

FIRST_STEP, MARK = "first-step", "held"
"""Files in the log folder that have the number of a process: after its first step, and when it is held."""
HOLD_S = 60.0


class AfterSteps(ScriptListener):
    """Calls a function at the end of an optimizer step, once `steps` were made."""

    def __init__(self, steps: int, call: Callable[[], object]) -> None:
        self._left, self._call = steps, call

    def on_step_end(self, optimizer: Optimizer) -> None:
        self._left -= 1
        if self._left == 0:
            self._call()


def mark(file: Path) -> None:
    """Write the number of this process."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(file) as temporary:
        temporary.write_text(str(os.getpid()))


def hold(log: Path) -> None:
    """Leave a mark in the log folder, and wait to be killed."""
    mark(log / MARK)
    time.sleep(HOLD_S)
