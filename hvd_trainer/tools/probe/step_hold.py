"""Hold a rank of a script after so many steps, so that a tool can kill it, or its launcher, at that step."""

from __future__ import annotations

import os
import time
from pathlib import Path

from torch.optim.optimizer import Optimizer

from hvd_trainer.tools.probe.script_events import ScriptListener
from hvd_trainer.utils.files import atomic_write

MARK = "held"
"""The file in the log folder that has the number of the held process."""
HOLD_S = 60.0


class StepHold(ScriptListener):
    """Waits after so many optimizer steps, and leaves a mark.

    Args:
        log: the log folder.
        steps: how many.
    """

    def __init__(self, log: Path, steps: int) -> None:
        self._log, self._left = log, steps

    def on_step_end(self, optimizer: Optimizer) -> None:
        self._left -= 1
        if self._left == 0:
            self._log.mkdir(parents=True, exist_ok=True)
            with atomic_write(self._log / MARK) as temporary:
                temporary.write_text(str(os.getpid()))
            time.sleep(HOLD_S)
