"""Measure a script in one of its ranks."""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import ExitStack
from functools import partial, wraps
from pathlib import Path
from types import ModuleType
from typing import Any

from torch.optim.optimizer import Optimizer

from hvd_trainer.launch.world import detect
from hvd_trainer.measure.after_steps import AfterSteps, hold
from hvd_trainer.measure.events import ScriptEvents, ScriptListener
from hvd_trainer.measure.leave_out import leave_out
from hvd_trainer.measure.message import Message
from hvd_trainer.measure.no_steps import NoSteps
from hvd_trainer.measure.script_steps import ScriptSteps
from hvd_trainer.measure.script_trace import ScriptTrace, seed_by_rank
from hvd_trainer.measure.stack_record import AFTER_STEP
from hvd_trainer.measure.stacks import count_elements, sampler
from hvd_trainer.utils.import_hooks import ImportHooks


def measure_script(message: Message) -> None:
    """Record what the message asks for, of whatever this process runs from now on; a `Trainer` records itself."""
    log, world = Path(message.log_dir), detect(os.environ)
    listeners: list[ScriptListener] = [NoSteps(log), ScriptSteps(log, world.rank)]
    if message.trace_steps is not None:
        seed_by_rank(world.rank)
        listeners.append(ScriptTrace(log, world.rank, world.size, message.trace_steps))
    if message.sample_stacks:
        listeners.append(ScriptStacks(log, world.rank))
    if message.max_steps is not None:
        listeners.append(AfterSteps(message.max_steps, sys.exit))
    if message.hold is not None and message.hold[0] == world.rank:
        listeners.append(AfterSteps(message.hold[1], partial(hold, log)))
    undo = leave_out(message.leave_out)  # first, so that what is left of it is seen
    events = ScriptEvents(*listeners)
    events.install()
    after = {"hvd_trainer.training.trainer": partial(_leave_to_trainer, events, undo)}
    ImportHooks(aliases={}, absent={}, after=after).install()


def _leave_to_trainer(events: ScriptEvents, undo: ExitStack, module: ModuleType) -> None:
    """Stop to listen when a `Trainer` is made, and leave nothing out: it obeys the message itself."""
    original = module.Trainer.__init__

    @wraps(original)
    def init(trainer: Any, *args: Any, **kwargs: Any) -> None:
        events.uninstall()
        undo.close()
        original(trainer, *args, **kwargs)

    module.Trainer.__init__ = init


class ScriptStacks(ScriptListener):
    """Samples the stacks of a script's rank, from the first optimizer step to the script's end."""

    def __init__(self, log: Path, rank: int) -> None:
        # Now: a loader starts its processes before the first step, and they may stay until the end.
        self._sampler = sampler(log, rank)

    def on_start(self, optimizer: Optimizer) -> None:
        self._sampler.device = optimizer.param_groups[0]["params"][0].device
        self._sampler.start()
        atexit.register(self._sampler.stop)

    def stop(self) -> None:
        self._sampler.stop()

    def on_phase(self, phase: str) -> None:
        self._sampler.phase = phase

    def on_batch(self, batch: Any, loader: object) -> None:
        self._sampler.elements += count_elements(batch)

    def on_step_end(self, optimizer: Optimizer) -> None:
        self._sampler.phase = AFTER_STEP
        self._sampler.end_step()
