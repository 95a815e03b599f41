"""The information that ranks exchange about themselves when they have met."""

from __future__ import annotations

import json
from datetime import timedelta

import pytest
import torch.distributed as dist

from hvd_trainer.errors import LaunchError
from hvd_trainer.launch.world import World
from hvd_trainer.rendezvous.ranks import RankInfo, exchange_rank_info

FIRST = RankInfo("node1", 0, "ddp", (0, 1), gpus=("0000:3c:00",), pid=7, stacks_fd=5)
SECOND = RankInfo("node2", 0, "ddp", ())
ENTRY = {"host": "node2", "local_rank": 0, "backend": "ddp", "cpus": []}


def as_rank_0(other: str) -> list[RankInfo]:
    """Exchange in a store in which rank 1 has done its part."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=5))
    store.set("peer/1", other)
    store.set("read/1", "")
    return exchange_rank_info(store, World(0, 2, 0, 2, launcher="torchrun"), FIRST)


def test_exchange_returns_entries_in_rank_order() -> None:
    assert as_rank_0(json.dumps(ENTRY)) == [FIRST, SECOND]


@pytest.mark.parametrize(
    "other", ["", "{}", "[1]", json.dumps(ENTRY | {"cpus": "all"}), json.dumps(ENTRY | {"pid": 1.5})]
)
def test_entry_of_another_version_is_a_launch_error(other: str) -> None:
    """The error was a TypeError that named a dataclass."""
    with pytest.raises(LaunchError, match="cannot read what another rank says .*Install one version"):
        as_rank_0(other)
