"""Make the recorders of a rank that a message asks for: the same for a job on the Trainer and for a script."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from hvd_trainer.measure.listener import Listener, Step
from hvd_trainer.measure.message import Message
from hvd_trainer.measure.stacks import sampler
from hvd_trainer.measure.steps import recorder
from hvd_trainer.utils.files import atomic_write

MARK = "stopped-{}"
"""The file in the log folder that has the number of the process that has stopped after so many steps."""


def recorders(message: Message, rank: int, size: int) -> Iterator[Listener]:
    """Yield what records the steps and stacks of this rank and traces it, and what stops it."""
    log = Path(message.log_dir)
    yield recorder(log, rank)
    if message.sample_stacks:
        # Now: a script's loader starts its processes before the first step, and they may stay until the end.
        yield sampler(log, rank)
    if message.trace_steps is not None:
        from hvd_trainer.measure.trace import Trace  # with what a Trainer needs

        yield Trace(log, rank, size, message.trace_steps)
    for steps in message.stop_at[1:] if message.stop_at[:1] == (rank,) else ():
        yield AfterSteps(steps, partial(_stop, log, steps))


class AfterSteps(Listener):
    """Calls a function at the end of an optimizer step, once `steps` were made."""

    def __init__(self, steps: int, call: Callable[[], object]) -> None:
        self._left, self._call = steps, call

    def on_step_end(self, step: Step) -> None:
        self._left -= 1
        if self._left == 0:
            self._call()


def _stop(log: Path, steps: int) -> None:
    """Leave a mark in the log folder, and stop until a tool lets this process continue."""
    log.mkdir(parents=True, exist_ok=True)
    with atomic_write(log / MARK.format(steps)) as temporary:
        temporary.write_text(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)
