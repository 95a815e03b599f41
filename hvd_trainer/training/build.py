"""Build all parts of one training from the arguments of `Trainer.fit` and the options."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
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
from hvd_trainer.config.options import LogOptions, TrainerOptions
from hvd_trainer.config.stop_condition import StopCondition
from hvd_trainer.data import Loader, LoaderPlan, make_loader
from hvd_trainer.faults.preemption import Requeue
from hvd_trainer.observe.callback import Callback
from hvd_trainer.observe.memory import PeakMemory
from hvd_trainer.observe.metrics import Metric
from hvd_trainer.observe.observers import make_observers
from hvd_trainer.observe.progress import Progress
from hvd_trainer.observe.run_log import RunLog
from hvd_trainer.observe.step_timer import FirstStep
from hvd_trainer.optim.captured_step import CapturedStep
from hvd_trainer.optim.learning_rate import Scheduler, StepRate, check_decay, count_warmup_steps, make_scheduler
from hvd_trainer.optim.non_finite import NonFiniteGuard
from hvd_trainer.optim.reproducible import ReproducibleStep
from hvd_trainer.optim.step import LossFunction, StepParts, TrainStep
from hvd_trainer.parallel.factory import make_layout
from hvd_trainer.parallel.layout import Layout
from hvd_trainer.training.kernels import check_kernels
from hvd_trainer.training.run import TrainingRun, count_steps
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
    callbacks: Sequence[Callback]
    collate: Callable[[list[Any]], Any] | None


def build_run(
    inputs: FitInputs,
    *,
    options: TrainerOptions,
    backend: Backend,
    stop_condition: StopCondition,
    requeue: Requeue,
    snapshot: InMemorySnapshot,
) -> TrainingRun:
    """Build all parts of a training, alike on all ranks. A collective.

    Args:
        inputs: the arguments of `fit`.
        options: all options.
        backend: the engine, started.
        stop_condition: the figure of --until.
        requeue: puts a Slurm job that was stopped back into its queue.
        snapshot: the state in memory that outlives this world.

    Raises:
        OptionError, DataError, BackendError, CheckpointError: the parts do not fit each other, or the ranks.
    """
    train = options.train
    with ExitStack() as resources:  # closes what is open if a later part cannot be built
        exchange = "exchange" not in options.measure.leave_out
        layout = make_layout(backend, options.parallel, train, exchange=exchange)
        resources.callback(layout.close)
        plan = BatchPlan.of(train, layout.shard.size * backend.num_replicas)
        layout.check_batch(plan.batch_size)
        progress = Progress()
        peak_memory = PeakMemory(backend)
        log = _open_log(backend, options.log)
        resources.callback(log.close)
        first_step = FirstStep(backend.device)
        observers = [first_step, *make_observers(options, backend, log)]
        callbacks = [*inputs.callbacks, *observers]
        stop_condition.check(_figure_names(inputs))
        train_loader = _build_loader(inputs, options, backend, layout, plan, inputs.train_data, shuffle=True)
        test_loader = None
        if inputs.test_data is not None:
            test_loader = _build_loader(inputs, options, backend, layout, plan, inputs.test_data, shuffle=False)
        needs_norm = any(callback.needs_norm for callback in callbacks)
        step = _build_step(inputs, options, backend, layout, train_loader, progress, needs_norm=needs_norm)
        resources.callback(step.close)
        scheduler = make_scheduler(inputs.scheduler, step.optimizer)
        state = _build_state(inputs, options, backend, layout, train_loader, progress, step, scheduler)
        manager = CheckpointManager(
            backend,
            options.save,
            log,
            is_enabled=options.log.log_dir is not None and not options.measure.leave_out,
            state=state,
            progress=progress,
            before_save=step.guard.check,
            snapshot=snapshot,
        )
        return TrainingRun(
            options=options,
            backend=backend,
            layout=layout,
            plan=plan,
            train_loader=train_loader,
            test_loader=test_loader,
            metrics=inputs.metrics,
            model=inputs.model,
            optimizer=step.optimizer,
            step=step,
            guard=step.guard,
            scheduler=scheduler,
            rate=_build_rate(options, plan, train_loader, step.optimizer),
            progress=progress,
            stop_condition=stop_condition,
            state=state,
            manager=manager,
            requeue=requeue,
            log=log,
            peak_memory=peak_memory,
            first_step=first_step,
            observers=observers,
            callbacks=callbacks,
            resources=resources.pop_all(),
        )


def _open_log(backend: Backend, options: LogOptions) -> RunLog:
    log = RunLog(backend, options.log_dir, quiet=options.quiet)
    if backend.session.monitor is not None:
        backend.session.monitor.log_folder = options.log_dir
    return log


def _figure_names(inputs: FitInputs) -> list[str]:
    """Return the names of the figures in an epoch's record, such as train_loss."""
    splits = ("train",) if inputs.test_data is None else ("train", "test")
    return [f"{split}_{name}" for split in splits for name in ("loss", *inputs.metrics)]


def _build_loader(
    inputs: FitInputs,
    options: TrainerOptions,
    backend: Backend,
    layout: Layout,
    plan: BatchPlan,
    data: Any,
    *,
    shuffle: bool,
) -> Loader:
    train = options.train
    loader_plan = LoaderPlan(
        batch_size=plan.batch_size * backend.num_replicas,
        seed=train.seed,
        shuffle=shuffle,
        virtual_ranks=train.reproducible,
        accumulate=train.accumulate,
        shard=layout.shard,
        num_workers=train.workers,
        prefetch=train.prefetch,
    )
    return make_loader(data, backend, loader_plan, collate=inputs.collate)


def _build_step(
    inputs: FitInputs,
    options: TrainerOptions,
    backend: Backend,
    layout: Layout,
    train_loader: Loader,
    progress: Progress,
    *,
    needs_norm: bool,
) -> TrainStep:
    """Connect the model to the engine, and return the step that trains it. A collective."""
    train, device = options.train, backend.device
    check_kernels(train, device)
    if train.channels_last:
        inputs.model.to(memory_format=torch.channels_last)
    layout.compile(inputs.model)
    with accelerator.side_stream(device) if train.capture_step else nullcontext() as stream:
        model, optimizer = layout.prepare(
            inputs.model, inputs.optimizer, lambda: next(iter(train_loader.epoch(0)))[0]
        )
    parts = StepParts(
        backend=backend,
        model=model,
        bare=inputs.model,
        optimizer=optimizer,
        loss=inputs.loss,
        progress=progress,
        guard=NonFiniteGuard(backend, train.non_finite, inputs.model),
        max_norm=train.max_norm,
        precision=train.precision,
        needs_norm=needs_norm,
    )
    if train.capture_step:
        return CapturedStep(parts, stream, is_uniform=train_loader.in_memory)
    if train.reproducible is None:
        return layout.make_step(parts)
    return ReproducibleStep(
        parts,
        virtual_ranks=train.reproducible,
        seed=train.seed,
        find_unused_parameters=options.engine.find_unused_parameters,
    )


def _build_state(
    inputs: FitInputs,
    options: TrainerOptions,
    backend: Backend,
    layout: Layout,
    train_loader: Loader,
    progress: Progress,
    step: TrainStep,
    scheduler: LRScheduler | None,
) -> TrainState:
    parts = {"optimizer": step.optimizer, "scheduler": scheduler, "scaler": step.scaler}
    return TrainState(
        backend,
        inputs.model,
        progress,
        {name: part for name, part in parts.items() if part is not None},
        {"seed": options.train.seed, "samples": train_loader.num_samples},
        layout,
        reproducible=options.train.reproducible is not None,
    )


def _build_rate(options: TrainerOptions, plan: BatchPlan, train_loader: Loader, optimizer: Optimizer) -> StepRate:
    train = options.train
    check_decay(train.lr_decay, train_loader.num_samples)
    return StepRate(
        optimizer,
        plan.lr_factor(train.lr_scaling),
        count_warmup_steps(train.warmup_epochs, count_steps(plan, train_loader)),
        train.lr_decay,
        decay_start=train.warmup_epochs / train.epochs,
    )
