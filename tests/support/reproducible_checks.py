"""Trainings that `test_reproducible.py` runs in every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import resume_checks
import torch
from trainings import digest

from hvd_trainer import EngineOptions, backends
from hvd_trainer.utils.tensors import pairwise_sum

VIRTUAL = 4
SETUPS: dict[str, dict[str, Any]] = {
    "memory": {},
    "random transform": resume_checks.SETUPS["random transform"],
    "workers": {"data": resume_checks.Items, "train": {"workers": 1}},
    "scheduler, clipping, accumulation": {
        "scheduler": resume_checks.halve,
        "train": {"accumulate": 2, "max_norm": 0.5, "global_batch_size": 32},
    },
    "fp16": resume_checks.SETUPS["fp16"],
}


def with_virtual_ranks(setup: dict[str, Any]) -> dict[str, Any]:
    return {**setup, "train": {**setup.get("train", {}), "reproducible": VIRTUAL}}


def trained(backend: str, folder: str) -> tuple[int, dict[str, str]]:
    """Return the weights and the optimizer's state of each set-up."""
    found, rank = {}, 0
    for number, (name, setup) in enumerate(SETUPS.items()):
        place = str(Path(folder) / str(number))
        run = resume_checks.run(backend, place, with_virtual_ranks(setup))
        found[name] = digest(run["weights"]) + run["optimizer"]
        rank = run["rank"]
    return rank, found


def interrupted(backend: str, folder: str) -> tuple[int, None]:
    """Train and stop inside the second epoch, 2 steps after the last save."""
    setup = with_virtual_ranks(SETUPS["memory"])
    run = resume_checks.run(backend, folder, setup, save_every_steps=9, stop_after=11)
    return run["rank"], None


def resumed(backend: str, folder: str, place: str) -> tuple[int, str]:
    run = resume_checks.run(backend, place, with_virtual_ranks(SETUPS["memory"]), resume=folder)
    return run["rank"], digest(run["weights"]) + run["optimizer"]


def sums(backend_name: str) -> tuple[int, list[bool]]:
    """Return whether sums over ranks are those of the tree, for tensors gathered whole and in slices."""
    with backends.create(EngineOptions(backend=backend_name)) as backend:  # type: ignore[arg-type]
        world = backend.world
        found = []
        for length in (1, 7, 300_001):
            generator = torch.Generator().manual_seed(length)
            everyone = list(torch.randn(world.size, length, generator=generator))
            found.append(backend.collectives.tree_sum(everyone[world.rank].clone()).equal(pairwise_sum(everyone)))
        return world.rank, found
