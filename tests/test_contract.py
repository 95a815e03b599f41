"""Both engines, and one process, keep the contract of `backends/base.py`: each through its own launcher."""

from __future__ import annotations

from functools import cache

import contract_checks
import pytest
from launchers import requires, run_ranks

SIZES = [
    pytest.param("single", "python", 1, id="single-1"),
    pytest.param("ddp", "torchrun", 1, id="ddp-1"),
    pytest.param("ddp", "torchrun", 2, id="ddp-2"),
    pytest.param("ddp", "torchrun", 3, id="ddp-3"),
    pytest.param("horovod", "horovodrun", 1, id="horovod-1", marks=requires("horovod")),
    pytest.param("horovod", "horovodrun", 2, id="horovod-2", marks=requires("horovod")),
    pytest.param("horovod", "horovodrun", 4, id="horovod-4", marks=requires("horovod")),
]


@cache
def outcomes(backend: str, launcher: str, size: int) -> list[dict[str, str | None]]:
    """One launch serves all checks; a launch takes as long as a hundred of them."""
    return run_ranks(
        contract_checks.run_checks, num_processes=size, launcher=launcher, args=(backend,), timeout_s=150
    )


@pytest.mark.parametrize(("backend", "launcher", "size"), SIZES)
@pytest.mark.parametrize("name", contract_checks.CHECKS)
def test_contract(backend: str, launcher: str, size: int, name: str) -> None:
    if (backend, name) == ("single", "fp16_on_the_wire"):
        assert "nothing to exchange" in contract_checks.refuses("single", compression="fp16")
        return
    for rank, outcome in enumerate(outcomes(backend, launcher, size)):
        assert outcome[name] is None, f"on rank {rank}:\n{outcome[name]}"


@pytest.mark.parametrize(
    ("backend", "options", "words"),
    [
        ("horovod", {"compression": "bf16"}, ["bfloat16", "--compression fp16", "--backend ddp"]),
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
def test_what_an_engine_cannot_do_is_refused(backend: str, options: dict[str, object], words: list[str]) -> None:
    message = contract_checks.refuses(backend, **options)
    for word in words:
        assert word in message
