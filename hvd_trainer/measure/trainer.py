"""Measure a job on the Trainer in one of its ranks: the options that a message changes, and what is recorded."""

from __future__ import annotations

import sys
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

from hvd_trainer.backends import StepResult
from hvd_trainer.config.options import TrainerOptions
from hvd_trainer.config.parser import flatten, with_values
from hvd_trainer.data import Batch
from hvd_trainer.errors import OptionError
from hvd_trainer.launch.engine import choose_engine
from hvd_trainer.measure.listener import End, Listener, Step
from hvd_trainer.measure.message import BACKEND, Message
from hvd_trainer.observe.callback import Observer, RunView
from hvd_trainer.observe.summary import facts

AFRESH = {"resume": "none", "save_every_epochs": None, "save_every_steps": None, "save_every_s": None}
"""Options with which a job begins at its first step, and no step has the time of a save."""
ENDLESS = {"epochs": 1_000_000, "until": None}
"""Options with which a job trains until its last step, however much data it has."""
RESULTS = ("train_loss", "val_loss", "train_accuracy", "val_accuracy", "bubble")
"""Figures of an epoch that are results of the run."""


def as_asked(options: TrainerOptions, environ: MutableMapping[str, str]) -> TrainerOptions:
    """Return the options of a job as the program wants them that has started it, with the engine for auto.

    A tool or `run --backend` may have started it. The same options are returned when it is called again.

    Raises:
        OptionError: they do not go with what shall be measured.
        LaunchError: as `detect`.
    """
    message, engine = Message.read(environ), environ.get(BACKEND)
    is_typed = any(word.partition("=")[0] == "--backend" for word in sys.argv)
    if message is not None:
        options = obey(message, options)
        if not message.exchange:
            from hvd_trainer.measure.leave_out import leave_out_exchange  # with torch

            leave_out_exchange()
    elif engine is not None and not is_typed:
        options = with_values(options, {"backend": engine})
    return with_values(options, {"backend": choose_engine(options.engine.backend, environ)})


def obey(message: Message, options: TrainerOptions) -> TrainerOptions:
    """Return the options of a job as a tool's message wants them.

    Raises:
        OptionError: they do not go with what shall be measured.
    """
    train, parallel = options.train, options.parallel
    if not message.exchange and (parallel.shard == "full" or train.reproducible is not None):
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


def observer(message: Message, rank: int, size: int) -> TrainerEvents:
    """Return the observer that records what the message asks for."""
    from hvd_trainer.measure.recorders import recorders  # a job that is not measured starts without them

    events = TrainerEvents(*recorders(message, rank, size))
    events.needs_norm = message.trace_steps is not None
    return events


class TrainerEvents(Observer):
    """Calls listeners for what the training loop does."""

    def __init__(self, *listeners: Listener) -> None:
        self._listeners = listeners
        self._samples = 0
        self._results: dict[str, Any] = {}

    @contextmanager
    def around_training(self, run: RunView) -> Iterator[None]:
        """Tell the listeners what happens while the context is open."""
        activity = run.backend.activity.listeners
        self._samples = run.progress.samples
        hook = run.optimizer.register_step_pre_hook(self._before_update)
        for listener in self._listeners:
            listener.on_run(run)
            listener.on_start(run.device, on_trainer=True)
            activity.append(listener.on_phase)
        try:
            yield
        finally:
            hook.remove()
            for listener in self._listeners:
                activity.remove(listener.on_phase)
                listener.stop()
        work = {
            **facts(run),
            "on_trainer": True,
            "sees_exchange": True,
            "in_parts": run.options.parallel.is_staged or run.options.parallel.shard != "none",
            "sequence_length": flatten(run.options).get("sequence_length"),
        }
        from hvd_trainer.measure.script_facts import digest

        weights = digest(parameter for parameter in run.model.parameters() if not parameter.is_meta)
        for listener in self._listeners:
            listener.on_end(End(work, self._results, weights))

    def _before_update(self, optimizer: Optimizer, *_: Any) -> None:
        for listener in self._listeners:
            listener.before_update(optimizer, again=False)

    def on_batches(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        for batch in batches:
            for listener in self._listeners:
                listener.on_batch(batch, self)
            yield batch

    def on_step_end(self, run: RunView, result: StepResult) -> None:
        step = Step(
            samples=run.progress.samples - self._samples,
            lr=run.rate.last_unread,
            losses=result.losses,
            skipped=result.skipped,
            weights=result.weights,
            grad_norm=result.grad_norm,
        )
        self._samples = run.progress.samples
        for listener in self._listeners:
            for _ in range(run.plan.passes):
                listener.on_pass()
            listener.on_step_end(step)

    def on_epoch_end(self, run: RunView, record: dict[str, Any]) -> None:
        for listener in self._listeners:
            listener.on_epoch_end(record)
        self._results = {name: record[name] for name in RESULTS if name in record}
