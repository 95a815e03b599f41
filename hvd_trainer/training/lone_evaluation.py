"""`Trainer.evaluate`: an evaluation before, after and without a training, or by a callback in one."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from hvd_trainer.backends import Backend
from hvd_trainer.backends.model_sync import check_same_model
from hvd_trainer.config.batch_plan import BatchPlan
from hvd_trainer.config.options import ParallelOptions, TrainerOptions
from hvd_trainer.data import check_same_data, draw_batches
from hvd_trainer.errors import OptionError
from hvd_trainer.optim.loss_module import modules_of
from hvd_trainer.optim.reproducible import computing
from hvd_trainer.optim.step import EvaluationStep
from hvd_trainer.parallel.placement import ModelPlacement
from hvd_trainer.training.evaluation import Evaluation
from hvd_trainer.training.fit_rules import cutting_option
from hvd_trainer.training.loading import Loading
from hvd_trainer.training.run import Inputs, TrainingRun
from hvd_trainer.utils.digest import digest


@dataclass(frozen=True, kw_only=True)
class EvaluationInputs(Inputs):
    """The arguments of `Trainer.evaluate`; see there."""

    data: Any


def evaluate(
    inputs: EvaluationInputs, options: TrainerOptions, backend: Backend, run: TrainingRun | None
) -> dict[str, float]:
    """Return loss, metrics and number of samples. A collective.

    Args:
        run: the training in which a callback evaluates; None: no training runs.
    """
    activity, phase = backend.activity, backend.activity.phase
    if run is None:
        activity.long_limit_s = activity.step_limit_s = options.engine.startup_timeout_s
    try:
        with computing(options.train, backend.device):
            if run is not None and inputs.model is run.model:
                figures = _of_training(inputs, run)()
            else:
                figures = _of_whole(inputs, options, backend)()
    finally:
        if run is None:
            activity.long_limit_s = activity.step_limit_s = None
    activity.enter(phase)
    return figures


def _of_training(inputs: EvaluationInputs, run: TrainingRun) -> Evaluation:
    """Return the evaluation of the model that is trained now, as its ranks have it."""
    step = copy(run.step)
    step.loss, step.weight = inputs.loss, inputs.weight
    if inputs.loss is not run.loss and isinstance(inputs.loss, nn.Module):
        _make_equal(inputs.loss, run.backend)
    return _make_evaluation(inputs, run.options, run.placement, step, run.plan)


def _of_whole(inputs: EvaluationInputs, options: TrainerOptions, backend: Backend) -> Evaluation:
    """Return the evaluation of a model of which each rank has a copy.

    Raises:
        OptionError: the options leave ranks only parts of it.
    """
    if option := cutting_option(options, backend):
        raise OptionError(
            f"evaluate is for whole models, and {option} cuts them: give the data to fit as val_data, let a "
            f"callback of fit evaluate the model that is trained, or leave {option} out"
        )
    train = options.train
    for module in modules_of(inputs.model, inputs.loss):
        _make_equal(module, backend)
    if train.channels_last:
        inputs.model.to(memory_format=torch.channels_last)
    step = EvaluationStep(
        backend=backend,
        eval_model=inputs.model,
        loss=inputs.loss,
        precision=train.precision,
        weight=inputs.weight,
    )
    placement = ModelPlacement(backend, ParallelOptions(), train)
    return _make_evaluation(inputs, options, placement, step, None)


def _make_evaluation(
    inputs: EvaluationInputs,
    options: TrainerOptions,
    placement: ModelPlacement,
    step: EvaluationStep,
    plan: BatchPlan | None,
) -> Evaluation:
    backend, data = step.backend, inputs.data
    check_same_data(backend, data=data)
    drawn = draw_batches(data, backend, options.train.seed)
    if plan is None:
        whole = data.batch_size if isinstance(data, DataLoader) else None
        replicas = placement.shard.size * backend.num_replicas
        plan = BatchPlan.of(options.train, replicas, whole if drawn is None else drawn.batch_size)
    loading = Loading(
        backend=backend,
        train=options.train,
        plan=plan,
        shard=placement.shard,
        collate=inputs.collate,
        batch_transform=inputs.batch_transform,
    )
    loader = loading.make_loader(data, drawn, shuffle=False)
    return Evaluation(backend, placement, inputs.model, step, loader, inputs.metrics)


def _make_equal(module: nn.Module, backend: Backend) -> None:
    """Move a module to the device; if ranks have other weights, all take rank 0's, as at the start of a training.

    Raises:
        BackendError: ranks have other models.
    """
    module.to(backend.device)
    check_same_model(backend.collectives, module)
    weights = digest([parameter.detach() for parameter in module.parameters()])
    if not all(backend.read(backend.are_equal(weights.to(backend.device)))):
        backend.broadcast_module(module)
