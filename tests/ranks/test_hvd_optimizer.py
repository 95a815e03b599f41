"""`hvd.DistributedOptimizer`: the real one's signature and bits, and what is right where the real one is not."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import Any

import hvd_optimizer_checks
import pytest
import torch
from hvd_checks import run_checks
from hvd_optimizer_checks import Net
from launchers import QUICKEST, launch, requires, run_ranks
from torch import nn

pytestmark = pytest.mark.warm

OURS, REAL = "hvd_trainer.hvd", "horovod.torch"
STEPS = 4
STALL = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "2", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "4"}
TRAININGS: dict[str, dict[str, Any]] = {
    "average": {},
    "sum": {"op": "Sum"},
    "fp16": {"compression": "fp16"},
    "predivided": {"gradient_predivide_factor": 4.0},
    "two passes": {"backward_passes_per_step": 2},
    "two groups": {"groups": 2},
    "listed groups": {"groups": "listed"},
    "unnamed": {"named": False},
    "clipped": {"clip": 0.05},
    "sparse": {"sparse": True},
    "sparse as dense": {"sparse": True, "sparse_as_dense": True},
    "different branches": {"branches": True},
}


def train(
    api: Any, *, named: bool = True, clip: float = 0.0, sparse: bool = False, branches: bool = False, **how: Any
) -> list[list[float]]:
    """Return the weights after some steps, in which each rank has its own data."""
    torch.manual_seed(0)
    model = Net(sparse)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.0 if sparse else 0.9)
    if how.get("groups") == "listed":
        how["groups"] = [[*model.heads.parameters()]]
    if "op" in how:
        how["op"] = getattr(api, how["op"])
    if "compression" in how:
        how["compression"] = getattr(api.Compression, how["compression"])
    optimizer = api.DistributedOptimizer(optimizer, model.named_parameters() if named else None, **how)
    generator = torch.Generator().manual_seed(api.rank())
    for _ in range(STEPS):
        optimizer.zero_grad()
        for _ in range(how.get("backward_passes_per_step", 1)):
            shape = (4 + api.rank(), 6)
            x = (
                torch.randint(10, shape, generator=generator)
                if sparse
                else torch.randn(shape, generator=generator)
            )
            model(x, (api.rank(),) if branches else (0, 1)).backward()
        if clip:
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), clip)
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
    return [parameter.detach().flatten().tolist() for parameter in model.parameters()]


def train_all(module: str) -> tuple[int, dict[str, list[list[float]]]]:
    api = importlib.import_module(module)
    api.init()
    rank = api.rank()
    weights = {name: train(api, **how) for name, how in TRAININGS.items()}
    api.shutdown()
    return rank, weights


@pytest.fixture(scope="module")
def ours() -> list[dict[str, list[list[float]]]]:
    result: list[dict[str, list[list[float]]]] = run_ranks(train_all, num_processes=2, args=[OURS])
    return result


@pytest.fixture(scope="module")
def real() -> list[dict[str, list[list[float]]]]:
    result: list[dict[str, list[list[float]]]] = run_ranks(
        train_all, num_processes=2, launcher="horovodrun", args=[REAL]
    )
    return result


@pytest.mark.parametrize("name", TRAININGS)
def test_ranks_have_the_same_weights(name: str, ours: list[dict[str, list[list[float]]]]) -> None:
    assert ours[0][name] == ours[1][name]


@requires("horovod")
@pytest.mark.parametrize("name", TRAININGS)
def test_weights_are_the_real_ones_bit_for_bit(
    name: str, ours: list[dict[str, list[list[float]]]], real: list[dict[str, list[list[float]]]]
) -> None:
    assert ours[0][name] == real[0][name]


def signature_of(module: str) -> list[tuple[str, Any, Any]]:
    its = inspect.signature(importlib.import_module(module).DistributedOptimizer)
    plain = (int, float, bool, type(None))
    return [
        (parameter.name, parameter.kind.name, parameter.default if isinstance(parameter.default, plain) else "")
        for parameter in its.parameters.values()
    ]


def real_signature() -> tuple[int, list[tuple[str, Any, Any]]]:
    return 0, signature_of(REAL)


@requires("horovod")
def test_signature_is_the_real_one() -> None:
    assert [signature_of(OURS)] == run_ranks(real_signature, num_processes=1)


# In two ranks.


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, str | None]]:
    result: list[dict[str, str | None]] = run_ranks(
        run_checks, num_processes=2, args=[hvd_optimizer_checks.CHECKS]
    )
    return result


@pytest.mark.parametrize("name", hvd_optimizer_checks.CHECKS)
def test_in_two_ranks(name: str, outcomes: list[dict[str, str | None]]) -> None:
    assert not [f"rank {rank}:\n{its[name]}" for rank, its in enumerate(outcomes) if its[name]]


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_with_fewer_batches_join(ranks: int) -> None:
    assert run_ranks(hvd_optimizer_checks.uneven_steps, num_processes=ranks) == [True] * ranks


def test_rank_joins_without_its_optimizer() -> None:
    assert run_ranks(hvd_optimizer_checks.uneven_steps_before_the_join, num_processes=2) == [
        [1.5] * 4,
        [1.5] * 4 + [1.0] * 3,
    ]


@pytest.mark.parametrize("in_known_step", [False, True])
def test_operations_fail_once_a_rank_has_shut_down(in_known_step: bool) -> None:
    texts = run_ranks(hvd_optimizer_checks.last_rank_leaves, num_processes=3, args=["shuts down", in_known_step])
    assert ["rank 2 called hvd.shutdown()" in text for text in texts] == [True, True, False]


@pytest.mark.parametrize("in_known_step", [False, True])
def test_stall_names_the_missing_rank_and_ends_the_wait(in_known_step: bool) -> None:
    args = ["never comes", in_known_step]
    texts = run_ranks(hvd_optimizer_checks.last_rank_leaves, num_processes=3, args=args, env=STALL)
    assert "ranks 0, 1 have waited for 4 s for rank 2 in allreduce.weight" in texts[0]


ENDS = {
    "raises": (QUICKEST, "raise RuntimeError('this is why')", {1}, "RuntimeError: this is why"),
    "is killed": ("torchrun", "os.kill(os.getpid(), 9)", {1}, "ended without a word"),
    # The launcher has the code of the rank that ends first, which may be the one that then waits in vain.
    "exits": (QUICKEST, "sys.exit(3)", {1, 3}, "rank 1 called hvd.shutdown() or came to its end"),
}


@pytest.mark.parametrize("end_at", [0, 5])
@pytest.mark.parametrize("how", ENDS)
def test_no_rank_waits_for_one_that(how: str, end_at: int, tmp_path: Path) -> None:
    """A rank ends in the first step or in a known one: the others end, too, and one of them says why."""
    launcher, statement, codes, said = ENDS[how]
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, torch\n"
        "from hvd_trainer import hvd\n"
        "hvd.init()\n"
        "model = torch.nn.Linear(2, 1)\n"
        "optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))\n"
        "hvd.allreduce(torch.ones(3))\n"
        "for step in range(9):\n"
        "    model(torch.ones(1, 2)).sum().backward()\n"
        f"    if step == {end_at} and hvd.rank() == 1:\n        {statement}\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
    )
    result = launch(launcher, 2, [str(script)], check=False, timeout_s=60)
    assert result.returncode in codes
    assert said in result.stdout + result.stderr
