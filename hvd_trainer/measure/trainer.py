"""Measure a job on the Trainer in one of its ranks: the options that a message changes, and its listeners."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from hvd_trainer.backends import StepResult
from hvd_trainer.config.options import TrainerOptions
from hvd_trainer.config.parser import flatten, with_values
from hvd_trainer.data import Batch
from hvd_trainer.errors import OptionError
from hvd_trainer.measure.after_steps import hold
from hvd_trainer.measure.message import BACKEND, Message
from hvd_trainer.measure.script_steps import digest
from hvd_trainer.measure.stack_record import FOLDER
from hvd_trainer.measure.stacks import StackSampler, count_elements
from hvd_trainer.measure.steps import recorder
from hvd_trainer.measure.trainer_trace import TrainerTrace
from hvd_trainer.observe.callback import Observer, RunView
from hvd_trainer.observe.summary import facts

AFRESH = {"resume": "none", "save_every_epochs": None, "save_every_steps": None, "save_every_s": None}
"""Options with which a job begins at its first step, and no step has the time of a save."""
ENDLESS = {"epochs": 1_000_000, "until": None}
"""Options with which a job trains until its last step, however much data it has."""
RESULTS = ("train_loss", "test_loss", "train_accuracy", "test_accuracy")
"""Figures of an epoch that are results of the run."""


def as_asked(options: TrainerOptions, environ: Mapping[str, str]) -> TrainerOptions:
    """Return the options of a job as the program wants them that has started it, a tool or `run --backend`.

    The same options are returned when it is called again.

    Raises:
        OptionError: they do not go with what shall be measured.
    """
    message, engine = Message.read(environ), environ.get(BACKEND)
    if message is not None:
        return obey(message, options)
    is_typed = any(word.partition("=")[0] == "--backend" for word in sys.argv)
    return options if engine is None or is_typed else with_values(options, {"backend": engine})


def obey(message: Message, options: TrainerOptions) -> TrainerOptions:
    """Return the options of a job as a tool's message wants them.

    Raises:
        OptionError: they do not go with what shall be measured.
    """
    train, parallel = options.train, options.parallel
    if "exchange" in message.leave_out and (parallel.shard == "full" or train.reproducible is not None):
        option = "--reproducible" if train.reproducible is not None else "--shard full"
        raise OptionError(f"Without the exchange of gradients this job cannot train: {option} needs it")
    changes: dict[str, Any] = {}
    if message.engine is not None:
        changes["backend"] = message.engine
    if message.max_steps is not None:
        changes |= AFRESH | (ENDLESS if message.endless else {})
        own = None if message.endless else options.train.max_steps
        changes["max_steps"] = message.max_steps if own is None else min(own, message.max_steps)
    return with_values(options, {**changes, **message.options})


def observers(message: Message, rank: int) -> Iterator[Observer]:
    """Yield the observers that record what the message asks for."""
    log = Path(message.log_dir)
    yield TrainerSteps(log, rank)
    if message.sample_stacks:
        yield TrainerStacks(log, rank)
    if message.trace_steps is not None:
        yield TrainerTrace(log, rank, message.trace_steps)
    if message.hold is not None and message.hold[0] == rank:
        yield Hold(log, message.hold[1])


class TrainerSteps(Observer):
    """Tells the recorder of steps what the training loop does."""

    def __init__(self, log: Path, rank: int) -> None:
        self._recorder = recorder(log, rank)
        self._samples, self._busy_s = 0, 0.0
        self._results: dict[str, Any] = {}

    @contextmanager
    def around_training(self, run: RunView) -> Iterator[None]:
        """Record each step while the context is open, and write all of them on exit.

        Raises:
            OSError: the folder cannot be written to.
        """
        listeners = run.backend.activity.listeners
        self._samples = run.progress.samples
        self._recorder.begin(run.device)
        listeners.append(self._recorder.enter)
        try:
            yield
        finally:
            listeners.remove(self._recorder.enter)
        self._recorder.write(
            facts={
                **facts(run),
                "on_trainer": True,
                "sees_exchange": True,
                "in_parts": run.options.parallel.is_staged or run.options.parallel.shard != "none",
                "sequence_length": flatten(run.options).get("sequence_length"),
            },
            results=self._results,
            weights=digest(parameter for parameter in run.model.parameters() if not parameter.is_meta),
        )

    def on_step_end(self, run: RunView, result: StepResult) -> None:
        busy = run.busy_s
        self._recorder.end_step(
            samples=run.progress.samples - self._samples,
            lr=run.rate.last,
            losses=result.losses,
            skipped=result.skipped,
            busy_s=None if busy is None else busy - self._busy_s,
        )
        self._samples, self._busy_s = run.progress.samples, busy or 0.0

    def on_epoch_end(self, run: RunView, record: dict[str, Any]) -> None:
        self._recorder.end_epoch()
        self._busy_s = 0.0
        self._results = {name: record[name] for name in RESULTS if name in record}


class TrainerStacks(Observer):
    """Samples the stacks of a rank while the training loop runs."""

    def __init__(self, log: Path, rank: int) -> None:
        self._sampler = StackSampler(log / FOLDER / f"rank-{rank}.json")

    @contextmanager
    def around_training(self, run: RunView) -> Iterator[None]:
        """Sample while the context is open, and write the counts on exit."""
        listeners = run.backend.activity.listeners
        listeners.append(self._enter)
        self._sampler.device = run.device
        self._sampler.install()
        self._sampler.start()
        try:
            yield
        finally:
            listeners.remove(self._enter)
            self._sampler.stop()

    def _enter(self, phase: str) -> None:
        self._sampler.phase = phase

    def on_batches(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        for batch in batches:
            self._sampler.elements += count_elements(batch)
            yield batch

    def on_step_end(self, run: RunView, result: StepResult) -> None:
        self._sampler.end_step()


class Hold(Observer):
    """Holds this rank at the end of a step, so that a tool can kill it there."""

    def __init__(self, log: Path, steps: int) -> None:
        self._left, self._hold = steps, partial(hold, log)

    def on_step_end(self, run: RunView, result: StepResult) -> None:
        self._left -= 1
        if self._left == 0:
            self._hold()
