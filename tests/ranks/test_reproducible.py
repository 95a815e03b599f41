"""`--reproducible`: the same bits on either engine, on 1, 2 and 4 ranks, and after a resume on others."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import digits_job
import pytest
import resume_checks
import torch
from launchers import QUICKEST, launch, requires, run_ranks
from trainings import digest

from hvd_trainer import EngineOptions, backends
from hvd_trainer.optim.reproducible import TreeSum, deterministic_algorithms
from hvd_trainer.utils.tensors import pairwise_sum

pytestmark = [requires("horovod"), pytest.mark.warm]

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
    "weights": {**resume_checks.SETUPS["weights"], "train": {"accumulate": 2, "global_batch_size": 32}},
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


WORLDS = [("single", 1), ("horovod", 1), ("ddp", 2), ("horovod", 2), ("ddp", 4), ("horovod", 4)]


def ranks(function: Any, backend: str, size: int, *args: str) -> list[Any]:
    return run_ranks(function, num_processes=size, args=(backend, *args), timeout_s=240)


@cache
def reference() -> dict[str, str]:
    """Return the results of one process, which computes all virtual ranks."""
    with tempfile.TemporaryDirectory() as folder:
        ((found),) = ranks(trained, "single", 1, folder)
    return dict(found)


@pytest.mark.parametrize(("backend", "size"), WORLDS[1:])
def test_bits_do_not_depend_on_engine_and_ranks(backend: str, size: int, tmp_path: Path) -> None:
    """The job has dropout, batch norm, transforms, loader processes, accumulation, clipping and fp16."""
    for found in ranks(trained, backend, size, str(tmp_path)):
        assert found == reference()


@pytest.mark.parametrize(
    ("before", "after"), [(("horovod", 4), ("ddp", 2)), (("single", 1), ("horovod", 2))], ids=str
)
def test_bits_do_not_depend_on_interruption(
    before: tuple[str, int], after: tuple[str, int], tmp_path: Path
) -> None:
    ranks(interrupted, *before, str(tmp_path / "first"))
    for found in ranks(resumed, *after, str(tmp_path / "first"), str(tmp_path / "second")):
        assert found == reference()["memory"]


@pytest.mark.parametrize(("backend", "size"), [("ddp", 2), ("ddp", 4), ("horovod", 4)])
def test_sums_over_ranks_follow_the_tree(backend: str, size: int) -> None:
    assert ranks(sums, backend, size) == [[True] * 3] * size


@pytest.mark.parametrize("count", [1, 2, 4, 8, 16])
def test_sums_within_a_rank_follow_the_tree(count: int) -> None:
    leaves = [torch.randn(50) for _ in range(count)]
    sums = TreeSum()
    for leaf in leaves:
        sums.add([leaf])
    assert sums.total()[0].equal(pairwise_sum(leaves))


def test_deterministic_algorithms_do_not_fill_new_tensors() -> None:
    """PyTorch's deterministic mode writes NaN into each new tensor first."""
    filling = torch.utils.deterministic.fill_uninitialized_memory
    with deterministic_algorithms(torch.device("cpu")):
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory
    assert torch.utils.deterministic.fill_uninitialized_memory == filling


def test_reproducible_needs_ranks_that_divide_it() -> None:
    result = launch(QUICKEST, 3, digits_job.argv("ddp", extra=["--reproducible", "4"]), check=False)
    assert result.returncode != 0
    assert "--reproducible 4 runs on 1, 2, 4 ranks" in result.stderr
