"""Checks of `make gpu-test` on the pretend device: they work before somebody has a GPU for them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from combinations import case
from gpu import failures, ranks, several
from gpu.bench import Bench

from pretend import build, startup

pytestmark = [
    pytest.mark.skipif(build.missing() is not None, reason=str(build.missing())),
]
SECONDS = 250.0


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setenv(startup.DEVICE, "as queued")
    # `auto` is the device that PyTorch names as the machine's accelerator.
    return Bench("auto", 2, None, tmp_path, until=time.monotonic() + SECONDS)


@pytest.mark.parametrize(
    ("engine", "fault", "rank"),
    [
        case("ddp", "is killed", 1),
        case("horovod", "is killed", 1, when="long"),
        case("ddp", "asserts on the device", 0, when="long"),
        case("horovod", "asserts on the device", 1, when="nightly"),
        case("ddp", "raises", 1, when="nightly"),
        case("ddp", "loops", 1, when="long"),
        case("horovod", "loops", 1, when="nightly"),
    ],
)
def test_failed_rank_is_blamed(bench: Bench, engine: str, fault: str, rank: int) -> None:
    """The other rank's device waits for it, and its host does where it next reads a number."""
    failures.check_blame(bench, engine, fault, rank)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("prove", "args"),
    [
        (ranks.check_resume, ()),
        (ranks.check_same_bits, ("--backend ddp",)),
        (ranks.check_same_bits, ("--backend horovod",)),
        (several.train_texts, ("1", "--devices-per-rank 2")),
    ],
)
def test_check(bench: Bench, prove: Any, args: tuple[Any, ...]) -> None:
    prove(bench, *args)
