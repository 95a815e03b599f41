"""Which ranks stand beside this one on other nodes, and how a lost rank ends all operations."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hvd_trainer.hvd.common import basics
from hvd_trainer.hvd.common.basics import Runtime


@pytest.mark.parametrize(("rank", "cross"), [(0, (0, 2)), (1, (1, 2)), (2, (0, 1))])
def test_cross_rank_is_the_place_among_ranks_of_the_same_local_rank(
    rank: int, cross: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On nodes of 1 and 2 ranks the last one said that it was number 1 of 1."""
    peers = [SimpleNamespace(local_rank=number) for number in (0, 0, 1)]
    world = SimpleNamespace(rank=rank, local_rank=peers[rank].local_rank, node_rank=min(rank, 1))
    runtime: Any = SimpleNamespace(world=world, session=SimpleNamespace(peers=peers))
    monkeypatch.setattr(basics._state, "runtime", runtime)
    assert (basics.cross_rank(), basics.cross_size()) == cross


def test_operations_end_while_process_sets_come_and_go() -> None:
    """The monitor's thread read the controllers while another one removed a process set."""
    runtime: Any = object.__new__(Runtime)
    ended = []

    def abort(reason: str) -> None:
        ended.append(reason)
        runtime._controllers.pop(1, None)

    runtime._controllers = {number: SimpleNamespace(abort=abort) for number in range(2)}
    runtime.abort_collectives()
    assert len(ended) == 2
