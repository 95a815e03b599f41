"""Build all parts of one training from the arguments of `Trainer.fit` and the options."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hvd_trainer.backends import Backend
from hvd_trainer.checkpoint.manager import CheckpointManager, InMemorySnapshot
from hvd_trainer.checkpoint.train_state import TrainState
from hvd_trainer.config.batch_plan import BatchPlan
from hvd_trainer.config.options import TrainerOptions
from hvd_trainer.config.stop_condition import StopCondition
from hvd_trainer.data import Loader, LoaderPlan, make_loader
from hvd_trainer.errors import OptionError
from hvd_trainer.faults.preemption import Requeue
from hvd_trainer.measure.message import Message
from hvd_trainer.measure.trainer import observer
from hvd_trainer.observe.callback import Callback, Observer
from hvd_trainer.observe.first_step import FirstStep
from hvd_trainer.observe.memory import PeakMemory
from hvd_trainer.observe.metrics import Metric
from hvd_trainer.observe.profile import Profile
from hvd_trainer.observe.progress import Progress
from hvd_trainer.observe.run_log import RunLog
from hvd_trainer.optim.learning_rate import Scheduler, StepRate, check_decay, count_warmup_steps, make_scheduler
from hvd_trainer.optim.non_finite import NonFiniteGuard
from hvd_trainer.optim.reproducible import ReproducibleStep
from hvd_trainer.optim.step import StepParts, TrainStep
from hvd_trainer.optim.weights import LossFunction, WeightFunction
from hvd_trainer.parallel.stage_placement import make_placement
from hvd_trainer.training.run import TrainingRun
from hvd_trainer.utils import accelerator


@dataclass(frozen=True, kw_only=True)
class FitInputs:
    """The arguments of `Trainer.fit`; see there."""

    model: nn.Module
    optimizer: Optimizer
    loss: LossFunction
    train_data: Any
    test_data: Any
    scheduler: Scheduler | None
    metrics: Mapping[str, Metric]
    weight: WeightFunction | None
    callbacks: Sequence[Callback]
    collate: Callable[[list[Any]], Any] | None
    batch_transform: Callable[[Any], Any] | None


def build_run(
    inputs: FitInputs,
    *,
    options: TrainerOptions,
    backend: Backend,
    message: Message | None,
    requeue: Requeue,
    snapshot: InMemorySnapshot,
) -> TrainingRun:
    """Build all parts of a training, alike on all ranks. A collective.

    Args:
        message: of the tool that measures the job; None: no tool does.

    Raises:
        OptionError, DataError, BackendError, CheckpointError: the parts do not fit each other, or the ranks.
    """
    stop_condition = StopCondition.parse(options.train.until)
    splits = ("train",) if inputs.test_data is None else ("train", "test")
    stop_condition.check([f"{split}_{name}" for split in splits for name in ("loss", *inputs.metrics)])
    with ExitStack() as resources:  # closes what is open if a later part cannot be built
        builder = _RunBuilder(inputs, options, backend, message, resources)
        return builder.build(stop_condition, requeue, snapshot)


class _RunBuilder:
    """Builds the parts of a run one after the other: first those that all others need.

    Args:
        resources: gets what closes each part.
    """

    def __init__(
        self,
        inputs: FitInputs,
        options: TrainerOptions,
        backend: Backend,
        message: Message | None,
        resources: ExitStack,
    ) -> None:
        self._inputs, self._options, self._backend, self._resources = inputs, options, backend, resources
        self._message = message
        self._leave_out = () if message is None else message.leave_out
        exchange = "exchange" not in self._leave_out
        self._placement = make_placement(backend, options.parallel, options.train, exchange=exchange)
        resources.callback(self._placement.close)
        self._plan = BatchPlan.of(options.train, self._placement.shard.size * backend.num_replicas)
        self._placement.check_batch(self._plan.batch_size)
        self._progress = Progress()

    def build(self, stop_condition: StopCondition, requeue: Requeue, snapshot: InMemorySnapshot) -> TrainingRun:
        """Build the other parts, and return the run."""
        inputs, options, backend = self._inputs, self._options, self._backend
        peak_memory = PeakMemory(backend)
        log = self._open_log()
        first_step = FirstStep(backend.device)
        listeners = [first_step, *self._build_observers(log)]
        callbacks = [*inputs.callbacks, *listeners]
        train_loader = self._build_loader(inputs.train_data, shuffle=True)
        test_loader = None if inputs.test_data is None else self._build_loader(inputs.test_data, shuffle=False)
        step = self._build_step(train_loader, needs_norm=any(callback.needs_norm for callback in callbacks))
        scheduler = make_scheduler(inputs.scheduler, step.optimizer)
        state = self._build_state(train_loader, step, scheduler)
        return TrainingRun(
            options=options,
            backend=backend,
            placement=self._placement,
            plan=self._plan,
            train_loader=train_loader,
            test_loader=test_loader,
            metrics=inputs.metrics,
            model=inputs.model,
            optimizer=step.optimizer,
            step=step,
            scheduler=scheduler,
            rate=self._build_rate(train_loader, step.optimizer),
            progress=self._progress,
            stop_condition=stop_condition,
            state=state,
            manager=self._build_manager(log, state, step, snapshot),
            requeue=requeue,
            log=log,
            peak_memory=peak_memory,
            first_step=first_step,
            observers=listeners,
            callbacks=callbacks,
            leave_out=self._leave_out,
            resources=self._resources.pop_all(),
        )

    def _open_log(self) -> RunLog:
        options, monitor = self._options.log, self._backend.session.monitor
        log = RunLog(self._backend, options.log_dir, quiet=options.quiet)
        self._resources.callback(log.close)
        if monitor is not None:
            monitor.log_folder = options.log_dir
        return log

    def _build_observers(self, log: RunLog) -> Iterator[Observer]:
        """Yield the observers that the options, or a tool, ask for."""
        measure, log_dir = self._options.measure, self._options.log.log_dir
        if measure.profile_steps is not None and log_dir is not None:
            yield Profile(self._backend, log, log_dir, measure.profile_steps, measure.profile_skip)
        if self._message is not None:
            yield observer(self._message, self._backend.world.rank, self._backend.world.size)

    def _build_loader(self, data: Any, *, shuffle: bool) -> Loader:
        train = self._options.train
        loader_plan = LoaderPlan(
            batch_size=self._plan.batch_size * self._backend.num_replicas,
            seed=train.seed,
            shuffle=shuffle,
            virtual_ranks=train.reproducible,
            accumulate=train.accumulate,
            shard=self._placement.shard,
            num_workers=train.workers,
            prefetch=train.prefetch,
            batch_transform=self._inputs.batch_transform,
        )
        return make_loader(data, self._backend, loader_plan, collate=self._inputs.collate)

    def _build_step(self, train_loader: Loader, *, needs_norm: bool) -> TrainStep:
        """Connect the model to the engine, and return the step that trains it. A collective."""
        train, inputs, backend = self._options.train, self._inputs, self._backend
        if train.tf32 and accelerator.is_host(backend.device):
            raise OptionError(
                f"--tf32 is for GPUs, and this rank trains on {accelerator.name(backend.device)}: leave it out"
            )
        if train.channels_last:
            inputs.model.to(memory_format=torch.channels_last)
        self._placement.compile(inputs.model)
        model, optimizer = self._placement.prepare(
            inputs.model, inputs.optimizer, lambda: next(iter(train_loader.epoch(0)))[0]
        )
        parts = StepParts(
            backend=backend,
            train_model=model,
            eval_model=inputs.model,
            optimizer=optimizer,
            loss=inputs.loss,
            progress=self._progress,
            guard=NonFiniteGuard(backend, train.non_finite, inputs.model),
            max_norm=train.max_norm,
            precision=train.precision,
            needs_norm=needs_norm,
            weight=inputs.weight,
            exchange="exchange" not in self._leave_out,
        )
        if train.reproducible is None:
            return self._placement.make_step(parts)
        return ReproducibleStep(
            parts,
            virtual_ranks=train.reproducible,
            seed=train.seed,
            find_unused_parameters=self._options.engine.find_unused_parameters,
        )

    def _build_rate(self, train_loader: Loader, optimizer: Optimizer) -> StepRate:
        train = self._options.train
        check_decay(train.lr_decay, train_loader.num_samples)
        return StepRate(
            optimizer,
            self._plan.lr_factor(train.lr_scaling),
            count_warmup_steps(train.warmup_epochs, self._plan.count_steps(train_loader.batches_per_epoch)),
            train.lr_decay,
            decay_start=train.warmup_epochs / train.epochs,
        )

    def _build_state(self, train_loader: Loader, step: TrainStep, scheduler: LRScheduler | None) -> TrainState:
        parts = {"optimizer": step.optimizer, "scheduler": scheduler, "scaler": step.scaler}
        return TrainState(
            backend=self._backend,
            model=self._inputs.model,
            progress=self._progress,
            others={name: part for name, part in parts.items() if part is not None},
            data={"seed": self._options.train.seed, "samples": train_loader.num_samples},
            parts=self._placement,
            reproducible=self._options.train.reproducible is not None,
        )

    def _build_manager(
        self, log: RunLog, state: TrainState, step: TrainStep, snapshot: InMemorySnapshot
    ) -> CheckpointManager:
        options = self._options
        return CheckpointManager(
            backend=self._backend,
            options=options.save,
            log=log,
            is_enabled=options.log.log_dir is not None and not self._leave_out,
            state=state,
            progress=self._progress,
            before_save=step.guard.check,
            snapshot=snapshot,
        )
