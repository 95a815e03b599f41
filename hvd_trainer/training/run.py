"""All parts of one training, which `TrainingLoop` works with (callbacks see a `RunView`).

part              on a batch's way
placement         the slice of each batch, and the part of the model, that this rank has
train_loader      yields this rank's batches, on its device
step              trains on them, with the model that the engine has connected to its gradient exchange
progress, metrics, log, callbacks, manager
                  count, measure, write, observe and save
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from hvd_trainer.backends import Backend
from hvd_trainer.checkpoint.manager import CheckpointManager, InMemorySnapshot
from hvd_trainer.checkpoint.train_state import Stateful, TrainState
from hvd_trainer.config.batch_plan import BatchPlan
from hvd_trainer.config.checks import refuse
from hvd_trainer.config.figures import StopCondition
from hvd_trainer.config.options import TrainerOptions
from hvd_trainer.data import DrawnBatches, Loader, check_same_data, draw_batches
from hvd_trainer.measure.message import Message
from hvd_trainer.measure.trainer import observer
from hvd_trainer.observe.callback import Callback, Observer, RunView, with_state
from hvd_trainer.observe.memory import PeakMemory
from hvd_trainer.observe.metrics import Metric
from hvd_trainer.observe.profile import Profile
from hvd_trainer.observe.progress import Progress
from hvd_trainer.observe.run_log import RunLog
from hvd_trainer.observe.trackers import Tracker
from hvd_trainer.optim.learning_rate import StepRate
from hvd_trainer.optim.loss_module import place_loss, with_loss
from hvd_trainer.optim.non_finite import NonFiniteGuard
from hvd_trainer.optim.replica_guard import ReplicaGuard
from hvd_trainer.optim.reproducible import ReproducibleStep
from hvd_trainer.optim.schedule import Interval, Schedule, Scheduler
from hvd_trainer.optim.step import StepParts, TrainStep
from hvd_trainer.optim.weights import LossFunction, WeightFunction
from hvd_trainer.parallel.stage_placement import make_placement
from hvd_trainer.training.evaluation import Evaluation
from hvd_trainer.training.fit_rules import batch_mistakes, data_mistakes, fit_mistakes
from hvd_trainer.training.loading import Loading
from hvd_trainer.training.schedule_rules import Length, length_mistakes, schedule_mistakes


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The arguments that `Trainer.fit` and `Trainer.evaluate` share; see there."""

    model: nn.Module
    loss: LossFunction
    metrics: Mapping[str, Metric]
    weight: WeightFunction | None
    collate: Callable[[list[Any]], Any] | None
    batch_transform: Callable[[Any], Any] | None


@dataclass(frozen=True, kw_only=True)
class FitInputs(Inputs):
    """The arguments of `Trainer.fit`; see there."""

    optimizer: Optimizer
    train_data: Any
    val_data: Any
    scheduler: Scheduler | None
    scheduler_step: Interval
    scheduler_metric: str | None
    callbacks: Sequence[Callback]


class TrainingRun(RunView):
    """One training in one world of ranks. A context manager: on exit it releases what holds connections.

    Building it is a collective.

    Args:
        message: of the tool that measures the job; None: no tool does.
        snapshot: of this training in earlier worlds of ranks.

    Raises:
        OptionError, DataError, BackendError, CheckpointError: the parts do not fit each other, or the ranks.
    """

    rate: StepRate

    def __init__(
        self,
        inputs: FitInputs,
        options: TrainerOptions,
        backend: Backend,
        *,
        message: Message | None,
        snapshot: InMemorySnapshot,
    ) -> None:
        self.options, self.backend = options, backend
        self.model, self.loss, self.metrics = inputs.model, inputs.loss, inputs.metrics
        # What the exchange, the comparison of ranks and checkpoints are about.
        self.trained = with_loss(inputs.model, inputs.loss)
        # A tool may want the exchange left out (`measure/leave_out.py`), to see what it costs.
        self.exchanges = message is None or message.exchange
        self.stop_condition = StopCondition.parse(options.train.until)
        splits = ("train",) if inputs.val_data is None else ("train", "val")
        self.schedule = Schedule(
            inputs.scheduler,
            inputs.optimizer,
            interval=inputs.scheduler_step,
            metric=inputs.scheduler_metric,
            default_metric=f"{splits[-1]}_loss",
        )
        figures = [f"{split}_{name}" for split in splits for name in ("loss", *inputs.metrics)]
        refuse(self._mistakes(inputs, figures))
        with ExitStack() as resources:  # closes what is open if a later part cannot be built
            self.placement = make_placement(backend, options.parallel, options.train)
            resources.callback(self.placement.close)
            # Trackers neither end a training nor change its data.
            self.has_callbacks = any(not isinstance(callback, Tracker) for callback in inputs.callbacks)
            self.plan, self.train_loader, self.val_loader = self._make_loaders(inputs)
            self.placement.set_batch_size(self.plan.batch_size)
            self.progress = Progress()
            self.peak_memory = PeakMemory(backend)
            self.log = RunLog(backend, options.log.log_dir, quiet=options.log.quiet)
            resources.callback(self.log.close)
            if backend.session.monitor is not None:
                backend.session.monitor.log_folder = options.log.log_dir
            self.observers = list(self._make_observers(message))
            self.callbacks = [*inputs.callbacks, *self.observers]
            self.step = self._make_step(inputs)
            self.evaluation = self._make_evaluation()
            self.optimizer = self.step.optimizer
            replicated = None if self.placement.is_sharded else self.optimizer
            self.replicas = ReplicaGuard(backend, self.trained, replicated)
            self.state = self._make_state()
            self.rate = self._make_rate()
            self.manager = self._make_manager(snapshot)
            self._resources = resources.pop_all()

    def _mistakes(self, inputs: FitInputs, figures: Sequence[str]) -> Iterator[str]:
        """Yield what the options and the arguments ask for that does not go together.

        Args:
            figures: names of those that a record of an epoch will have.
        """
        options, train = self.options, self.options.train
        yield from fit_mistakes(options, self.backend, inputs.optimizer, inputs.loss, figures)
        has_own_size = train.global_batch_size is not None or isinstance(inputs.train_data, DataLoader)
        yield from schedule_mistakes(
            self.schedule,
            inputs.optimizer,
            train,
            inputs.metrics,
            figures,
            steps_may_change=self.backend.session.driver is not None and not has_own_size,
        )

    def _make_loaders(self, inputs: FitInputs) -> tuple[BatchPlan, Loader, Loader | None]:
        """Return the plan of batches, and the loaders of training and validation data. A collective.

        Raises:
            OptionError, DataError: the data does not go with the options.
        """
        options, backend, seed = self.options, self.backend, self.options.train.seed
        check_same_data(backend, train_data=inputs.train_data, val_data=inputs.val_data)
        drawn = draw_batches(inputs.train_data, backend, seed)
        plan = self._make_plan(inputs.train_data, drawn)
        loading = Loading(
            backend=backend,
            train=options.train,
            plan=plan,
            shard=self.placement.shard,
            collate=inputs.collate,
            batch_transform=inputs.batch_transform,
            renew_workers=self.has_callbacks,
        )
        train_loader, val_loader = loading.make_loader(inputs.train_data, drawn, shuffle=True), None
        if inputs.val_data is not None:
            drawn = draw_batches(inputs.val_data, backend, seed)
            val_loader = loading.make_loader(inputs.val_data, drawn, shuffle=False)
        of_batches = batch_mistakes(options, plan, inputs.train_data)
        refuse([*of_batches, *data_mistakes(options, train_loader, val_loader)])
        return plan, train_loader, val_loader

    def _make_observers(self, message: Message | None) -> Iterator[Observer]:
        """Yield the observers that the options, or a tool, ask for."""
        measure, log_dir = self.options.measure, self.options.log.log_dir
        if measure.profile_steps is not None and log_dir is not None:
            yield Profile(self.backend, self.log, log_dir, measure.profile_steps, measure.profile_skip)
        if message is not None:
            yield observer(message, self.world.rank, self.world.size)

    def _make_plan(self, data: Any, drawn: DrawnBatches | None) -> BatchPlan:
        """Return how a batch is shared out over ranks and passes: one of the options, or a `DataLoader`'s."""
        whole = data.batch_size if isinstance(data, DataLoader) else None
        replicas = self.placement.shard.size * self.backend.num_replicas
        return BatchPlan.of(self.options.train, replicas, whole if drawn is None else drawn.batch_size)

    def _make_step(self, inputs: FitInputs) -> TrainStep:
        """Connect the model to the engine, and return the step that trains it. A collective."""
        train, backend, model = self.options.train, self.backend, self.model
        if train.channels_last:
            model.to(memory_format=torch.channels_last)
        self.placement.compile(model)
        place_loss(inputs.loss, backend)
        train_model, optimizer = self.placement.prepare(
            model, inputs.loss, inputs.optimizer, lambda: next(iter(self.train_loader.epoch(0)))[0]
        )
        parts = StepParts(
            backend=backend,
            train_model=train_model,
            eval_model=model,
            optimizer=optimizer,
            loss=inputs.loss,
            progress=self.progress,
            guard=NonFiniteGuard(backend, train.non_finite, model),
            max_norm=train.max_norm,
            precision=train.precision,
            needs_norm=any(callback.needs_norm for callback in self.callbacks),
            weight=inputs.weight,
        )
        if train.reproducible is None:
            return self.placement.make_step(parts)
        return ReproducibleStep(
            parts,
            virtual_ranks=train.reproducible,
            seed=train.seed,
            find_unused_parameters=self.options.engine.find_unused_parameters,
        )

    def _make_evaluation(self) -> Evaluation | None:
        """Return the evaluation on the validation data; None without."""
        if self.val_loader is None:
            return None
        return Evaluation(self.backend, self.placement, self.model, self.step, self.val_loader, self.metrics)

    def _make_state(self) -> TrainState:
        """Return what collects and restores the contents of a checkpoint."""
        parts: dict[str, Stateful | None]
        parts = {"optimizer": self.optimizer, "scheduler": self.schedule.scheduler, "scaler": self.step.scaler}
        # Of a DataLoader whose samplers have generators.
        parts["sampler"] = drawn if (drawn := self.train_loader.plan.drawn) and drawn.generators else None
        parts |= {"loss": self.loss} if isinstance(self.loss, nn.Module) and self.loss.state_dict() else {}
        return TrainState(
            backend=self.backend,
            model=self.model,
            progress=self.progress,
            others={name: part for name, part in parts.items() if part is not None},
            data={"seed": self.options.train.seed, "samples": self.train_loader.num_samples},
            parts=self.placement,
            callbacks=with_state(self.callbacks),
            reproducible=self.options.train.reproducible is not None,
            scheduler_step=self.schedule.interval,
        )

    def _make_rate(self) -> StepRate:
        train, samples = self.options.train, self.train_loader.num_samples
        return StepRate(
            self.optimizer,
            self.progress,
            factor=self.plan.lr_factor(train.lr_scaling),
            epochs=train.epochs,
            warmup_epochs=train.warmup_epochs,
            step_epochs=1.0 if not samples else min(1.0, self.plan.global_batch_size / samples),
            decay=train.lr_decay,
        )

    def _make_manager(self, snapshot: InMemorySnapshot) -> CheckpointManager:
        return CheckpointManager(
            backend=self.backend,
            options=self.options.save,
            log=self.log,
            is_enabled=self.options.log.log_dir is not None and self.exchanges,
            state=self.state,
            progress=self.progress,
            before_save=self.check,
            snapshot=snapshot,
        )

    def check(self) -> None:
        """Check that what would be saved is finite, and that copies of it on ranks are equal. A collective.

        Raises:
            NonFiniteError, ReplicasDifferError: it is not.
        """
        self.step.guard.check()
        if self.placement.has_copies and self.exchanges:
            self.replicas.check()

    def __enter__(self) -> TrainingRun:
        return self

    def __exit__(self, *_: object) -> None:
        # The engine's connections must be free before it ends, or before ranks meet in another world.
        self._resources.close()

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to train: by epochs, by steps, by a callback or by the stop condition."""
        train, progress = self.options.train, self.progress
        ended = progress.epoch >= train.epochs or progress.step >= (train.max_steps or math.inf)
        return ended or bool(progress.stopped) or self.stop_condition.is_reached(progress.figures)

    @property
    def epochs_done(self) -> float:
        """The epochs that are done, with the fraction of the running one; for a stream whole epochs."""
        progress, samples = self.progress, self.train_loader.num_samples
        return progress.epoch + (0.0 if samples is None else min(1.0, progress.consumed / samples))

    @property
    def length(self) -> Length:
        """How long this training is, and what is left of it."""
        train, progress, samples = self.options.train, self.progress, self.train_loader.num_samples
        epochs, steps, drawn = train.epochs - progress.epoch, self.steps_per_epoch, self.train_loader.plan.drawn
        if steps is None or samples is None or (drawn is not None and not drawn.is_regular):
            return Length(epochs=train.epochs, epochs_left=epochs)
        rest = steps
        if progress.consumed:
            # A source of batches gives each shard equally many samples, and leaves out what is over.
            over = samples % self.placement.shard.size if self.train_loader.has_own_loader else 0
            rest = -(-max(0, samples - over - progress.consumed) // self.plan.global_batch_size)
        return Length(
            epochs=train.epochs,
            epochs_left=epochs,
            steps_per_epoch=steps,
            steps_left=(epochs - 1) * steps + rest,
            max_steps_left=None if train.max_steps is None else train.max_steps - progress.step,
            batches_per_epoch=-(-samples // (self.plan.whole or self.plan.batch_size)),
        )

    def _is_over_now(self) -> bool:
        """Return whether nothing is left to train of what is restored.

        Raises:
            OptionError: the scheduler's length does not go with what is left.
        """
        if not self.is_over:
            refuse(length_mistakes(self.schedule, self.length))
        return self.is_over

    def restore(self) -> None:
        """Resume from the newest snapshot or checkpoint, if there is one. A collective."""
        rate = self.rate.full
        is_restored = self.manager.restore(seed=self.options.train.seed, is_over=self._is_over_now)
        if is_restored and self.rate.full != rate:
            self.say(f"resume   with the checkpoint's learning rate, {self.rate.full:g}, not {rate:g}")
        if is_restored and self.progress.stopped:
            self.say("resume   a callback has ended this training; to train on: --resume-partial callbacks")
