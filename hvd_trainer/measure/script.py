"""Measure a script in one of its ranks."""

from __future__ import annotations

import os
import random
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from hvd_trainer.launch.world import detect
from hvd_trainer.measure.events import ScriptEvents
from hvd_trainer.measure.leave_out import leave_out_exchange
from hvd_trainer.measure.message import Message
from hvd_trainer.measure.recorders import AfterSteps, recorders
from hvd_trainer.utils.import_hooks import ImportHooks, wrap


def measure_script(message: Message) -> None:
    """Record what the message asks for, of whatever this process runs from now on; a `Trainer` records itself."""
    log, world = Path(message.log_dir), detect(os.environ)
    listeners = list(recorders(message, world.rank, world.size))
    if message.trace_steps is not None:
        _seed(world.rank)
        # A script may seed all ranks alike: without an exchange they would train alike, too.
        listeners.append(AfterSteps(1, partial(_seed, world.rank)))
    if message.max_steps is not None:
        listeners.append(AfterSteps(message.max_steps, sys.exit))
    if not message.exchange:  # first, so that what is left of it is seen
        leave_out_exchange()
    events = ScriptEvents(log, *listeners)
    events.install()
    after = {"hvd_trainer.training.trainer": partial(_leave_to_trainer, events)}
    ImportHooks(aliases={}, absent={}, after=after).install()


def _seed(rank: int) -> None:
    """Seed the generators for a script that does not: alike on all engines, and otherwise on each rank."""
    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(rank)


def _leave_to_trainer(events: ScriptEvents, module: ModuleType) -> None:
    """Stop to listen when a `Trainer` is made: it obeys the message itself."""

    def init(original: Any, *args: Any, **kwargs: Any) -> None:
        events.uninstall()
        original(*args, **kwargs)

    wrap("__init__", init, module.Trainer)
