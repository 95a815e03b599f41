"""Install a probe in a rank of a script."""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch.optim.optimizer import Optimizer

from hvd_trainer.launch.world import detect
from hvd_trainer.observe.stack_record import FOLDER
from hvd_trainer.observe.stacks import StackSampler, count_elements
from hvd_trainer.tools.probe.leave_out import leave_out
from hvd_trainer.tools.probe.options import ProbeOptions
from hvd_trainer.tools.probe.script_events import ScriptEvents, ScriptListener
from hvd_trainer.tools.probe.step_times import ScriptStepTimes
from hvd_trainer.tools.probe.trace import ScriptTrace, seed_by_rank
from hvd_trainer.utils.files import atomic_write

MARK = "held"
"""The file in the log folder that has the number of the held process."""
HOLD_S = 60.0


def install_probe(options: ProbeOptions) -> None:
    """Record what the options ask for, of whatever this process runs from now on."""
    log, world = Path(options.log_dir), detect(os.environ)
    listeners: list[ScriptListener] = [ScriptStepTimes(log, world.rank)]
    if options.trace_steps is not None:
        seed_by_rank(world.rank)
        listeners.append(ScriptTrace(log, world.rank, world.size, options.trace_steps))
    if options.sample_stacks:
        listeners.append(ScriptStacks(log, world.rank))
    if options.max_steps is not None:
        listeners.append(AfterSteps(options.max_steps, sys.exit))
    if options.hold is not None and options.hold[0] == world.rank:
        listeners.append(AfterSteps(options.hold[1], partial(hold, log)))
    leave_out(options.leave_out)  # first, so that what is left of it is seen
    ScriptEvents(*listeners).install()


class ScriptStacks(ScriptListener):
    """Samples a rank's stacks from its first optimizer step to the script's end, as `observe/stacks.py` does."""

    def __init__(self, log: Path, rank: int) -> None:
        self._sampler = StackSampler(log / FOLDER / f"rank-{rank}.json")
        # A loader starts its processes before the first step, and they may stay until the end.
        self._sampler.sample_children()

    def on_start(self, optimizer: Optimizer) -> None:
        self._sampler.device = optimizer.param_groups[0]["params"][0].device
        self._sampler.start()
        atexit.register(self._sampler.stop)

    def on_phase(self, phase: str) -> None:
        self._sampler.phase = phase

    def on_batch(self, batch: Any, loader: object) -> None:
        self._sampler.elements += count_elements(batch)

    def on_step_end(self, optimizer: Optimizer) -> None:
        self._sampler.end_step()


class AfterSteps(ScriptListener):
    """Calls a function at the end of an optimizer step, once `steps` were made."""

    def __init__(self, steps: int, call: Callable[[], object]) -> None:
        self._left, self._call = steps, call

    def on_step_end(self, optimizer: Optimizer) -> None:
        self._left -= 1
        if self._left == 0:
            self._call()


def hold(log: Path) -> None:
    """Leave a mark in the log folder, and wait to be killed."""
    log.mkdir(parents=True, exist_ok=True)
    with atomic_write(log / MARK) as temporary:
        temporary.write_text(str(os.getpid()))
    time.sleep(HOLD_S)
