"""The information that ranks exchange about themselves when they have met."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import pytest
import torch.distributed as dist

from hvd_trainer.errors import LaunchError
from hvd_trainer.launch.world import World
from hvd_trainer.rendezvous.ranks import RankInfo, exchange_rank_info

FIRST = RankInfo("node1", 0, "ddp", (0, 1), gpus=("0000:3c:00",), pid=7, stacks_fd=5)
SECOND = RankInfo("node2", 0, "ddp", ())
ENTRY = {"host": "node2", "local_rank": 0, "backend": "ddp", "cpus": [], "num_ranks": 2}


def as_rank_0(other: str) -> list[RankInfo]:
    """Exchange in a store in which rank 1 has done its part."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=5))
    store.set("peer/1", other)
    store.set("read/1", "")
    return exchange_rank_info(store, World(0, 2, 0, 2, launcher="torchrun"), FIRST)


def test_exchange_returns_entries_in_rank_order() -> None:
    assert as_rank_0(json.dumps(ENTRY)) == [replace(FIRST, num_ranks=2), replace(SECOND, num_ranks=2)]


@pytest.mark.parametrize(
    "other", ["", "{}", "[1]", json.dumps(ENTRY | {"cpus": "all"}), json.dumps(ENTRY | {"pid": 1.5})]
)
def test_entry_of_another_version_is_a_launch_error(other: str) -> None:
    """The error was a TypeError that named a dataclass."""
    with pytest.raises(LaunchError, match="cannot read what another rank says .*Install one version"):
        as_rank_0(other)


def exchange_all(*ranks: tuple[int, int]) -> list[str]:
    """Return what each rank says that the exchange has refused, given their numbers and numbers of ranks."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=1))

    def exchange(rank: int, size: int, pid: int) -> str:
        with pytest.raises(LaunchError) as refused:
            exchange_rank_info(store, World(rank, size, launcher="hand"), replace(SECOND, pid=pid))
        return str(refused.value)

    with ThreadPoolExecutor(len(ranks)) as pool:
        waiting = [pool.submit(exchange, *numbers, pid) for pid, numbers in enumerate(ranks)]
        return [one.result() for one in waiting]


@pytest.mark.parametrize("ranks", [((0, 3), (1, 3), (2, 4)), ((0, 2), (1, 3), (2, 3))])
def test_ranks_with_different_numbers_of_ranks_all_say_so(ranks: tuple[tuple[int, int], ...]) -> None:
    """One ended in an IndexError, and others waited in their engine for one that was not there."""
    said = exchange_all(*ranks)
    wrong = next(rank for rank, size in ranks if size != ranks[0][1])
    assert all(text.startswith(f"Rank {wrong} was told that there are {ranks[wrong][1]} ranks") for text in said)
    assert all(f"and rank 0 that there are {ranks[0][1]}. Set WORLD_SIZE" in text for text in said)


def test_two_processes_of_one_rank_and_the_ranks_that_wait_say_why() -> None:
    said = exchange_all((0, 3), (1, 3), (1, 3))
    assert sum("Two processes say that they are rank 1 of 3" in text for text in said) == 1
    assert sum("waited for all 3 ranks, and rank 2 did not come" in text for text in said) == 2
