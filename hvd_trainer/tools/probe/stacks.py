"""Sample the stacks of a script's rank, in the format of `observe/stacks.py`."""

from __future__ import annotations

import atexit
from pathlib import Path
from typing import Any

from torch.optim.optimizer import Optimizer

from hvd_trainer.observe.stack_record import AFTER_STEP, FOLDER
from hvd_trainer.observe.stacks import StackSampler, count_elements
from hvd_trainer.tools.probe.script_events import ScriptListener


class ScriptStacks(ScriptListener):
    """Samples from the first optimizer step to the script's end."""

    def __init__(self, log: Path, rank: int) -> None:
        self._sampler = StackSampler(log / FOLDER / f"rank-{rank}.json")
        # A loader starts its processes before the first step, and they may stay until the end.
        self._sampler.install()

    def on_start(self, optimizer: Optimizer) -> None:
        self._sampler.device = optimizer.param_groups[0]["params"][0].device
        self._sampler.start()
        atexit.register(self._sampler.stop)

    def on_phase(self, phase: str) -> None:
        self._sampler.phase = phase

    def on_batch(self, batch: Any, loader: object) -> None:
        self._sampler.elements += count_elements(batch)

    def on_step_end(self, optimizer: Optimizer) -> None:
        self._sampler.phase = AFTER_STEP
        self._sampler.end_step()
