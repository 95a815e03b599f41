"""Trainings on one rank and on two, which share a GPU if there is only one: engines, options, equal bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import device_checks
import own_host
import pytest
import ways_to_train as ways
from ways_to_train import DIGITS, ENGINES, TEXTS, TWO_RANKS

from gpu.machine import InRanks, Record, cuda_only, gpus, launch

pytestmark = pytest.mark.gpu
OVER_GLOO = "--backend ddp --transport gloo"
ONE_HOST = {own_host.WANTED: None}
"""For ranks that share a GPU without NCCL."""
BITS: dict[str, str] = {}
"""The digest of the weights that several tests must give, by the name of the comparison."""
Train = Callable[..., str]


def cases(rows: dict[str, str], *before: str) -> list[Any]:
    """Return a case for each row, with these values before its name."""
    return [pytest.param(*before, name, marks=[cuda_only] if ways.needs_cuda(rows[name]) else []) for name in rows]


@pytest.fixture
def train(in_ranks: InRanks, tmp_path: Path, record_property: Record) -> Train:
    """Return a function that trains in so many ranks, so many times, and returns the weights' digest."""

    def run(ranks: int, text: str, times: int = 1, job: str = "mnist", env: Any = None) -> str:
        args = (job, [text], str(tmp_path), ["as queued"] * times)
        digest: str = in_ranks(ranks, device_checks.same_bits, *args, env=env)[0][text]
        record_property("weights", digest)
        return digest

    return run


@pytest.fixture
def one_rank(train: Train) -> str:
    """Return what one rank trains of `ANY_NUMBER_OF_RANKS`, each time."""
    if "one rank" not in BITS:
        BITS["one rank"] = train(1, f"{ways.ANY_NUMBER_OF_RANKS} --backend single", times=2)
    return BITS["one rank"]


@pytest.mark.parametrize(
    ("engine", "ranks"), [("ddp", 2), ("horovod", 2), pytest.param("ddp", 4, marks=gpus(4))], indirect=["engine"]
)
def test_more_ranks_train_the_same_bits(engine: str, ranks: int, one_rank: str, train: Train) -> None:
    assert train(ranks, f"{ways.ANY_NUMBER_OF_RANKS} --backend {engine}") == one_rank


@cuda_only
def test_gloo_trains_the_same_bits(one_rank: str, train: Train) -> None:
    assert train(2, f"{ways.ANY_NUMBER_OF_RANKS} {OVER_GLOO}", env=ONE_HOST) == one_rank


@pytest.mark.parametrize("precision", ways.PRECISIONS)
@pytest.mark.parametrize("engine", ["single", *ENGINES], indirect=True)
def test_one_rank(engine: str, precision: str, train: Train) -> None:
    train(1, f"{DIGITS} --backend {engine} --precision {precision}")


@pytest.mark.parametrize("name", cases(ways.ONE_RANK))
def test_one_rank_with(name: str, train: Train) -> None:
    train(1, f"{DIGITS} {ways.ONE_RANK[name]}")


@pytest.mark.parametrize(
    ("engine", "name"), [it for own in ENGINES for it in cases(ways.two_ranks(own), own)], indirect=["engine"]
)
def test_two_ranks(engine: str, name: str, train: Train) -> None:
    digest = train(2, f"{DIGITS} --backend {engine} {TWO_RANKS[name]}")
    if name == "plain":
        assert digest == BITS.setdefault(name, digest), "the other engine trains other weights"


def test_horovod_that_waits_for_exchanges_trains_the_same_bits(horovod: float, train: Train) -> None:
    waiting = {"HOROVOD_ENABLE_ASYNC_COMPLETION": "0"}
    assert train(2, f"{DIGITS} --backend horovod", env=waiting) == train(2, f"{DIGITS} --backend horovod")


@pytest.mark.parametrize(("engine", "text"), ways.TWO_RANKS_OF_TEXTS, indirect=["engine"])
def test_two_ranks_of_texts(engine: str, text: str, train: Train) -> None:
    train(2, f"{TEXTS} --backend {engine} {text}", job="imdb")


@cuda_only
@pytest.mark.parametrize("name", ["accumulated", "bf16"])
def test_two_ranks_over_gloo(name: str, train: Train) -> None:
    train(2, f"{DIGITS} {OVER_GLOO} {TWO_RANKS[name]}", env=ONE_HOST)


@cuda_only
def test_stages_over_gloo_are_refused() -> None:
    job = ["-m", "hvd_trainer.imdb", *TEXTS.split(), *OVER_GLOO.split(), "--stages", "2"]
    result = launch("torchrun", 2, job, check=False)
    assert result.returncode != 0
    assert "nccl" in result.stderr
