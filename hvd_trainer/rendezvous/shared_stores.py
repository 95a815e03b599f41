"""Names for the sessions of this process, and stores that serve several of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch.distributed as dist


class JobStore(NamedTuple):
    """The result of a rendezvous: what all ranks share."""

    store: dist.Store
    host: str
    """address of rank 0's machine, at which the other ranks reach it"""


class SharedStores:
    """Numbers this process's sessions, and keeps the stores that are at a fixed place.

    A session is one training. If each session opened a store of its own at the same port, a fast rank would find
    the store of the previous session, which slower ranks are about to close.
    """

    def __init__(self) -> None:
        self._sessions = itertools.count()
        self._stores: dict[str, dist.Store] = {}

    def next_session(self) -> str:
        """Return the name of a new session: the prefix of its keys."""
        return f"hvd_trainer.{next(self._sessions)}"

    def reset_sessions(self) -> None:
        """Count sessions from 0 again, as new processes do: horovodrun has cleared its key-value store."""
        self._sessions = itertools.count()

    def get(self, place: str, open_store: Callable[[], dist.Store]) -> dist.Store:
        """Return the store at a place; open it if this process has not yet."""
        if place not in self._stores:
            self._stores[place] = open_store()
        return self._stores[place]


shared_stores = SharedStores()
