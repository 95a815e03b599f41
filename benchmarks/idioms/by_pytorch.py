"""A loop by hand on DistributedDataParallel, as PyTorch's tutorials and its ImageNet example write it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Subset

from benchmarks.idioms.idiom import Idiom
from benchmarks.idioms.ranks import Start


def train(start: Start) -> list[float]:
    """Train in this rank, and return the values."""
    dist.init_process_group("gloo")
    for _ in range(start.make().trainings):
        idiom = start.make()
        fit(idiom, start)
    dist.destroy_process_group()
    return idiom.values()


def wrap(module: nn.Module, start: Start) -> nn.Module:
    """Return the module with its gradients exchanged."""
    return DistributedDataParallel(module, find_unused_parameters="find_unused_parameters" in start.way)


def make_loader(idiom: Idiom, start: Start) -> DataLoader[Any]:
    """Return a loader of this rank's share; what the user has chosen is kept."""
    chosen = dict(idiom.loading())
    if idiom.batch_sampler is not None:
        return DataLoader(idiom.data, batch_sampler=idiom.batch_sampler, **chosen)
    if idiom.sampler is None and not isinstance(idiom.data, IterableDataset):
        chosen["sampler"] = DistributedSampler(idiom.data)
    if start.loader_processes:
        chosen["num_workers"] = start.loader_processes
        chosen["persistent_workers"] = "persistent_workers=True" in start.way
    return DataLoader(idiom.data, idiom.batch // start.size, **chosen)


def fit(idiom: Idiom, start: Start) -> None:
    """Train, evaluate, save."""
    model, optimizer, loader = wrap(idiom.model, start), idiom.optimizer, make_loader(idiom, start)
    loss = wrap(idiom.loss, start) if "DDP(loss)" in start.way else idiom.loss
    scheduler, first = idiom.scheduler(), 1
    if start.part == 2:
        saved = torch.load(start.saved / "last.pt")
        idiom.model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        idiom.state.load_state_dict(saved["state"])
        first = saved["epoch"] + 1
    for epoch in range(first, idiom.epochs + 1):
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch)
        model.train()
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss(model(inputs), targets).backward()
            optimizer.step()
            if idiom.scheduler_step == "step":
                scheduler.step()
        if idiom.val_data is not None:
            idiom.val_metric = evaluate(model, idiom, start)
        if idiom.scheduler_step == "metric":
            scheduler.step(idiom.val_metric)
        idiom.after_epoch(epoch)
        if "wrapped again" in start.way:
            model = wrap(idiom.model, start)
        if idiom.resumes and start.rank == 0:
            start.saved.mkdir(exist_ok=True)
            parts = {"model": idiom.model, "optimizer": optimizer, "state": idiom.state}
            state = {name: part.state_dict() for name, part in parts.items()}
            torch.save(state | {"epoch": epoch}, start.saved / "last.pt")


@torch.no_grad()
def evaluate(model: nn.Module, idiom: Idiom, start: Start) -> float:
    """Return the mean of the metric over the validation data, added up over the ranks."""
    model.eval()
    with_rest = "ImageNet" in start.way
    sampler = DistributedSampler(idiom.val_data, shuffle=False, drop_last=with_rest)
    total = torch.zeros(2)
    _add(total, model, idiom, DataLoader(idiom.val_data, idiom.batch // start.size, sampler=sampler))
    dist.all_reduce(total)
    if with_rest and (shared := len(sampler) * start.size) < len(idiom.val_data):
        rest = Subset(idiom.val_data, range(shared, len(idiom.val_data)))
        _add(total, model, idiom, DataLoader(rest, idiom.batch))
    return float(total[0] / total[1])


def _add(total: torch.Tensor, model: nn.Module, idiom: Idiom, loader: DataLoader[Any]) -> None:
    for inputs, targets in loader:
        values = idiom.metric(model(inputs), targets)
        total += torch.tensor([values.sum(), len(values)])
