"""Hugging Face Accelerate's `prepare`, in the loop of its documentation."""

from __future__ import annotations

import logging
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration, DistributedDataParallelKwargs
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from benchmarks.idioms.idiom import Idiom
from benchmarks.idioms.ranks import Start


def train(start: Start) -> list[float]:
    """Train in this rank, and return the values."""
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    options: dict[str, bool] = {}
    if "split_batches" in start.way:
        options["split_batches"] = True
    if "even_batches=False" in start.way:
        options["even_batches"] = False
    accelerator = Accelerator(
        cpu=True,
        dataloader_config=DataLoaderConfiguration(**options),
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters="find_unused" in start.way)],
    )
    for _ in range(start.make().trainings):
        idiom = start.make()
        fit(accelerator, idiom, start)
    accelerator.end_training()
    return idiom.values()


def make_loader(idiom: Idiom, start: Start) -> DataLoader[Any]:
    """Return the loader as for one process."""
    chosen = dict(idiom.loading())
    if idiom.batch_sampler is not None:
        return DataLoader(idiom.data, batch_sampler=idiom.batch_sampler, **chosen)
    if start.loader_processes:
        chosen["num_workers"] = start.loader_processes
        chosen["persistent_workers"] = "persistent_workers=True" in start.way
    chosen["shuffle"] = idiom.sampler is None and not isinstance(idiom.data, IterableDataset)
    return DataLoader(idiom.data, idiom.batch // (1 if "split_batches" in start.way else start.size), **chosen)


def fit(accelerator: Accelerator, idiom: Idiom, start: Start) -> None:
    """Train, evaluate, save."""
    loader = make_loader(idiom, start)
    scheduler = idiom.scheduler()
    if idiom.scheduler_step == "step":
        # Of one process: the prepared scheduler takes as many steps at once as there are processes.
        scheduler = idiom.scheduler(len(loader) * idiom.epochs)
    model, optimizer = accelerator.prepare(idiom.model, idiom.optimizer)
    if "without `prepare(loader)`" not in start.way:
        loader = accelerator.prepare(loader)
    loss = accelerator.prepare(idiom.loss) if "prepare(loss)" in start.way else idiom.loss
    if idiom.scheduler_step == "step":
        scheduler = accelerator.prepare(scheduler)
    val = None
    if idiom.val_data is not None:
        val = accelerator.prepare(DataLoader(idiom.val_data, idiom.batch // start.size))
    if idiom.state is not None:
        accelerator.register_for_checkpointing(idiom.state)
    first = 1
    if start.part == 2:
        accelerator.load_state(start.saved)
        first = idiom.state.epochs + 1
    for epoch in range(first, idiom.epochs + 1):
        model.train()
        for inputs, targets in loader:
            optimizer.zero_grad()
            value = loss(model(inputs), targets)
            if "by items" in start.way:
                items = idiom.item_count((inputs, targets))
                all_items = accelerator.gather(torch.tensor([items])).sum()
                value = value * items * accelerator.num_processes / all_items
            accelerator.backward(value)
            optimizer.step()
            if idiom.scheduler_step == "step":
                scheduler.step()
        if val is not None:
            idiom.val_metric = evaluate(accelerator, model, idiom, val)
        if idiom.scheduler_step == "metric":
            scheduler.step(idiom.val_metric)
        idiom.after_epoch(epoch)
        if "prepared again" in start.way:
            model = accelerator.prepare(accelerator.unwrap_model(model))
        if idiom.resumes:
            accelerator.save_state(start.saved)


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: nn.Module, idiom: Idiom, loader: Any) -> float:
    """Return the mean of the metric over what the processes gather."""
    model.eval()
    values = [
        idiom.metric(*accelerator.gather_for_metrics((model(inputs), targets))) for inputs, targets in loader
    ]
    return float(torch.cat(values).mean())
