"""Which options do not go with a training's device, optimizer, metrics and data: known once ranks have met."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator
from typing import Any

from torch.optim import Optimizer
from torch.utils.data import IterableDataset

from hvd_trainer.backends import Backend
from hvd_trainer.config.batch_plan import BatchPlan
from hvd_trainer.config.figures import BestFigure, StopCondition
from hvd_trainer.config.launch_rules import usual_batch_sizes
from hvd_trainer.config.options import SaveOptions, TrainerOptions
from hvd_trainer.data import Loader
from hvd_trainer.optim.loss_module import is_trained
from hvd_trainer.optim.weights import LossFunction
from hvd_trainer.utils import accelerator


def fit_mistakes(
    options: TrainerOptions,
    backend: Backend,
    optimizer: Optimizer,
    loss: LossFunction,
    figures: Collection[str],
) -> Iterator[str]:
    """Yield a message for each option, or argument of `fit`, that does not go with the rest.

    Args:
        figures: those that epochs' records will have.
    """
    yield from _device_mistakes(options, backend)
    if _needs_closure(optimizer):
        yield (
            f"{type(optimizer).__name__} computes the loss several times in a step, by a closure, and a Trainer "
            f"once: take another optimizer, or write the loop yourself and start it by hvd-trainer run"
        )
    if is_trained(loss) and (option := _without_place_for_loss(options, backend)):
        yield (
            f"The loss ({type(loss).__name__}) has parameters, which {option} has no place for: leave it out, or "
            "make the loss a part of the model"
        )
    if options.train.evaluate_every_steps is not None and "val_loss" not in figures:
        yield "--evaluate-every-steps: this job has nothing to evaluate on. Give fit val_data, or leave it out"
    for typed, figure in _named_figures(options):
        if figure not in figures:
            yield f"{typed}: this job has no {figure}, but {', '.join(sorted(figures))}"


def batch_mistakes(options: TrainerOptions, plan: BatchPlan, data: Any) -> Iterator[str]:
    """Yield a message for each option that does not go with the batches of a `DataLoader`."""
    if plan.whole is None:
        return
    train, parallel = options.train, options.parallel
    change = f"Leave the option out, or change the DataLoader, whose longest batch has {plan.whole} samples"
    if train.global_batch_size not in (None, plan.global_batch_size):
        yield (
            f"--global-batch-size {train.global_batch_size}: by its DataLoader a step has "
            f"{plan.global_batch_size} samples. {change}"
        )
    if train.batch_size not in (plan.batch_size, *usual_batch_sizes(options)):
        yield f"--batch-size {train.batch_size}: by its DataLoader it is {plan.batch_size}. {change}"
    rest = plan.whole % plan.size
    if isinstance(data.dataset, IterableDataset) and rest:
        yield (
            f"The DataLoader's batches of {plan.whole} samples of a stream do not divide among {plan.among}: "
            f"write batch_size={plan.size * plan.batch_size}"
        )
    if parallel.is_staged and parallel.num_chunks > plan.batch_size:
        yield (
            f"--chunks {parallel.num_chunks} cuts a batch of {plan.batch_size} into less than one sample. Type "
            f"--chunks {plan.batch_size} or less, or give the DataLoader larger batches"
        )


def data_mistakes(options: TrainerOptions, train_loader: Loader, val_loader: Loader | None) -> Iterator[str]:
    """Yield a message for each option that does not go with the data."""
    train = options.train
    for loader in (train_loader,) if val_loader is None else (train_loader, val_loader):
        if train.reproducible is not None and (loader.has_own_loader or loader.num_samples is None):
            what = "gives batches" if loader.has_own_loader else "is a stream"
            yield f"--reproducible needs a data set with a length and an order, and {loader.name} {what}"
        if train.prefetch is not None and not loader.num_workers:
            yield (
                f"--prefetch {train.prefetch} is for loader processes, and the data set ({loader.name}) is loaded "
                f"without: {'' if loader.has_own_loader else 'add --workers 2, or '}leave it out"
            )
        if loader.shards_by_rank and options.parallel.stages > 1:
            yield (
                f"--stages gives several ranks the same samples, and {loader.name} gives each rank others "
                f"(shards_by_rank): let it give all samples, or leave out --stages"
            )
    curves = {"--warmup-epochs": train.warmup_epochs > 0, "--lr-decay": train.lr_decay != "none"}
    for option, is_set in curves.items():
        if is_set and train_loader.num_samples is None:
            yield f"{option} needs a data set that knows its length, and {train_loader.name} does not"


def cutting_option(options: TrainerOptions, backend: Backend) -> str | None:
    """Return the option that leaves each rank only a part of the model, or of a batch; None if none does."""
    if options.parallel.is_staged:
        return options.parallel.cut_by
    return "--shard full" if options.parallel.shard == "full" and len(backend.replica_group) > 1 else None


def _without_place_for_loss(options: TrainerOptions, backend: Backend) -> str | None:
    """Return the option that keeps a loss from being trained; None if none does."""
    alone = "--backend data-parallel" if backend.num_replicas > 1 else None
    return cutting_option(options, backend) or alone


def _device_mistakes(options: TrainerOptions, backend: Backend) -> Iterator[str]:
    device, stages = backend.device, options.parallel.stages
    if options.train.tf32 and accelerator.is_host(device):
        yield f"--tf32 is for GPUs, and this rank trains on {accelerator.name(device)}: leave it out"
    if stages > 1 and not accelerator.is_host(device) and not backend.uses_nccl:
        yield (
            f"--stages {stages} sends tensors of {device} to other ranks, and Gloo sends the host's. Leave out "
            f"--transport gloo, so that {accelerator.collectives(device)} sends them between ranks with a GPU "
            f"each, or train on CPUs with --device cpu"
        )


def _needs_closure(optimizer: Optimizer) -> bool:
    """Return whether an optimizer's step cannot be called without a closure, as that of LBFGS."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _named_figures(options: TrainerOptions) -> Iterator[tuple[str, str]]:
    """Yield each option that names a figure, as it is typed, and the figure."""
    until, keep_best = StopCondition.parse(options.train.until), options.save.keep_best
    if until.figure:
        yield f"--until '{until}'", until.figure
    # Without data to validate on, no record has the default's, and none is kept by it.
    if keep_best is not None and keep_best != SaveOptions.keep_best:
        yield f"--keep-best {keep_best}", BestFigure.parse(keep_best).figure
