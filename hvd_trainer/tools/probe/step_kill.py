"""Kill a rank of a script after so many steps."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from torch.optim.optimizer import Optimizer

from hvd_trainer.tools.probe.script_events import ScriptListener

MARK = "killed"
"""The file in the log folder that says so."""


class StepKill(ScriptListener):
    """Ends this process by SIGKILL after so many optimizer steps, and leaves a mark.

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
            (self._log / MARK).touch()
            os.kill(os.getpid(), signal.SIGKILL)
