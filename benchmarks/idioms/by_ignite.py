"""PyTorch Ignite's `auto_dataloader`, `auto_model` and `auto_optim`, on native PyTorch."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import ignite.distributed as idist
from ignite.engine import Engine, Events, create_supervised_evaluator
from ignite.handlers import Checkpoint, DiskSaver, LRScheduler, ReduceLROnPlateauScheduler
from ignite.metrics import Average
from torch.utils.data import DistributedSampler, IterableDataset

from benchmarks.idioms.idiom import Idiom
from benchmarks.idioms.ranks import Start


def train(start: Start) -> list[float]:
    """Train in this rank, and return the values."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    with idist.Parallel(backend="gloo") as parallel:
        for _ in range(start.make().trainings):
            idiom = start.make()
            parallel.run(fit, idiom, start)
    return idiom.values()


def make_loader(idiom: Idiom, start: Start) -> Any:
    """Return a loader of this rank's share; `auto_dataloader` divides the batch by the number of ranks."""
    chosen = dict(idiom.loading())
    if idiom.batch_sampler is not None:
        return idist.auto_dataloader(idiom.data, batch_sampler=idiom.batch_sampler, **chosen)
    if start.loader_processes:
        # It is the number of all ranks of a node.
        chosen["num_workers"] = start.loader_processes * start.size
        chosen["persistent_workers"] = "persistent_workers=True" in start.way
    if idiom.sampler is None and not isinstance(idiom.data, IterableDataset):
        chosen["shuffle"] = True
    return idist.auto_dataloader(idiom.data, batch_size=idiom.batch, **chosen)


def fit(local_rank: int, idiom: Idiom, start: Start) -> None:
    """Train, evaluate, save."""
    loader = make_loader(idiom, start)
    wrapped = {"find_unused_parameters": True} if "find_unused" in start.way and start.size > 1 else {}
    model = idist.auto_model(idiom.model, **wrapped)
    loss = idist.auto_model(idiom.loss) if "auto_model(loss)" in start.way else idiom.loss
    optimizer = idist.auto_optim(idiom.optimizer)

    def step(engine: Engine, batch: Any) -> None:
        model.train()
        optimizer.zero_grad()
        inputs, targets = batch
        loss(model(inputs), targets).backward()
        optimizer.step()

    trainer = Engine(step)

    @trainer.on(Events.EPOCH_STARTED)
    def _set_epoch() -> None:
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(trainer.state.epoch)

    if idiom.scheduler_step == "step":
        trainer.add_event_handler(Events.ITERATION_STARTED, LRScheduler(idiom.scheduler()))
    if idiom.val_data is not None:
        _evaluate_each_epoch(trainer, model, idiom)

    @trainer.on(Events.EPOCH_COMPLETED)
    def _act() -> None:
        nonlocal model
        idiom.after_epoch(trainer.state.epoch)
        if "wrapped again" in start.way:
            model = idist.auto_model(idiom.model)

    if idiom.resumes:
        parts = {"trainer": trainer, "model": model, "optimizer": optimizer, "state": idiom.state}
        saver = DiskSaver(str(start.saved), require_empty=False)
        keep = Checkpoint(parts, saver, filename_pattern="last.pt")
        trainer.add_event_handler(Events.EPOCH_COMPLETED, keep)
        if start.part == 2:
            Checkpoint.load_objects(parts, start.saved / "last.pt")
    trainer.run(loader, max_epochs=idiom.epochs)


def _evaluate_each_epoch(trainer: Any, model: Any, idiom: Idiom) -> None:
    # Values of one column: of a vector Ignite takes the mean as one sample.
    mean = Average(lambda output: idiom.metric(*output).unsqueeze(1))
    evaluator = create_supervised_evaluator(model, {"metric": mean}, device=idist.device())
    val = idist.auto_dataloader(idiom.val_data, batch_size=idiom.batch, shuffle=False)
    if idiom.scheduler_step == "metric":
        plateau = ReduceLROnPlateauScheduler(
            idiom.optimizer, "metric", mode="max", patience=0, factor=0.5, trainer=trainer
        )
        evaluator.add_event_handler(Events.COMPLETED, plateau)

    @trainer.on(Events.EPOCH_COMPLETED)
    def _evaluate() -> None:
        idiom.val_metric = float(evaluator.run(val).metrics["metric"])
