"""Install a probe in a rank of a script."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

from hvd_trainer.launch.world import detect
from hvd_trainer.tools.probe.after_steps import FIRST_STEP, AfterSteps, hold, mark
from hvd_trainer.tools.probe.leave_out import leave_out
from hvd_trainer.tools.probe.no_steps import NoSteps
from hvd_trainer.tools.probe.options import ProbeOptions
from hvd_trainer.tools.probe.script_events import ScriptEvents, ScriptListener
from hvd_trainer.tools.probe.stacks import ScriptStacks
from hvd_trainer.tools.probe.step_times import ScriptStepTimes
from hvd_trainer.tools.probe.trace import ScriptTrace, seed_by_rank


def install_probe(options: ProbeOptions) -> None:
    """Record what the options ask for, of whatever this process runs from now on."""
    log, world = Path(options.log_dir), detect(os.environ)
    listeners: list[ScriptListener] = [NoSteps(log), ScriptStepTimes(log, world.rank)]
    if options.trace_steps is not None:
        seed_by_rank(world.rank)
        listeners.append(ScriptTrace(log, world.rank, world.size, options.trace_steps))
    if options.sample_stacks:
        listeners.append(ScriptStacks(log, world.rank))
    if options.max_steps is not None:
        listeners.append(AfterSteps(options.max_steps, sys.exit))
    if options.hold is not None and options.hold[0] == world.rank:
        listeners.append(AfterSteps(1, partial(mark, log / FIRST_STEP)))
        listeners.append(AfterSteps(options.hold[1], partial(hold, log)))
    leave_out(options.leave_out)  # first, so that what is left of it is seen
    ScriptEvents(*listeners).install()
