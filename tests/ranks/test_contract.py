"""Both engines, and one process, keep the contract of `backends/base.py`: each through its own launcher."""

from __future__ import annotations

from functools import cache

import contract_checks
import pytest
from combinations import case
from launchers import run_ranks

pytestmark = pytest.mark.warm

WORLDS = [
    *(("single", "python", 1), ("ddp", "torchrun", 2), ("horovod", "horovodrun", 2)),
    *(("ddp", "torchrun", 1), ("ddp", "torchrun", 3), ("horovod", "horovodrun", 1), ("horovod", "horovodrun", 4)),
]
"""Engines, launchers and numbers of ranks; the first three run on each push, the others as long tests."""
SIZES = [
    case(*world, name=f"{world[0]}-{world[2]}", when="" if world in WORLDS[:3] else "long") for world in WORLDS
]


@cache
def outcomes(backend: str, launcher: str, size: int) -> list[dict[str, str | None]]:
    """Run all checks in one launch, which takes as long as a hundred of them."""
    return run_ranks(
        contract_checks.run_checks, num_processes=size, launcher=launcher, args=(backend,), timeout_s=150
    )


@pytest.mark.parametrize(("backend", "launcher", "size"), SIZES)
@pytest.mark.parametrize("name", contract_checks.CHECKS)
def test_contract(backend: str, launcher: str, size: int, name: str) -> None:
    if backend == "single" and (format := name.partition("_on_the_wire"))[1]:
        assert "nothing to exchange" in contract_checks.refuses("single", compression=format[0])
        return
    for rank, outcome in enumerate(outcomes(backend, launcher, size)):
        assert outcome[name] is None, f"on rank {rank}:\n{outcome[name]}"


@pytest.mark.parametrize(
    ("backend", "options", "words"),
    [
        ("horovod", {"compression": "powersgd"}, ["--compression powersgd", "--backend ddp"]),
        ("horovod", {"transport": "gloo"}, ["--transport gloo", "--backend ddp"]),
        ("horovod", {"static_graph": True}, ["--static-graph", "--backend ddp"]),
        ("ddp", {"adasum": True}, ["--adasum", "--backend horovod"]),
        ("ddp", {"autotune": True}, ["--autotune", "--backend horovod"]),
        ("ddp", {"num_groups": 2}, ["--num-groups 2", "--backend horovod"]),
        ("ddp", {"cycle_time_ms": 2.0, "adasum": True}, ["--cycle-time-ms", "--adasum"]),
        ("single", {"compression": "fp16"}, ["--compression fp16", "leave it out"]),
        ("mpi", {}, ["'mpi'", "horovod, ddp, single"]),
    ],
)
def test_unsupported_options_are_refused(backend: str, options: dict[str, object], words: list[str]) -> None:
    message = contract_checks.refuses(backend, **options)
    for word in words:
        assert word in message
