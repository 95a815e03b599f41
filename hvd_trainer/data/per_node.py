"""Work that one rank per node does for all ranks of that node: downloads, caches."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from datetime import timedelta

from hvd_trainer.backends import Backend
from hvd_trainer.errors import DataError, OptionError

_CALLS = itertools.count()


class SharedDataError(DataError, OptionError):
    """Trouble with the data that all ranks know of, so that rank 0 alone says it."""


def once_per_node(backend: Backend, prepare: Callable[[], str | None], *, timeout_s: float = 600.0) -> list[str]:
    """Runs `prepare` on the first rank of each node while the others wait. All ranks must call it.

    They wait at the store where the ranks met, not in the engine, whose own time limit may be shorter than a
    download and which may be busy polling meanwhile.

    Args:
        prepare: returns None when done, or what is wrong. An exception counts as trouble, too.
        timeout_s: how long the others wait, in seconds.

    Returns:
        On all ranks: what went wrong, one entry per node that had trouble; empty if all is well.

    Raises:
        DataError: a node was not done in time.
    """
    calling = _calling(backend)
    first = {node: rank for rank, node in reversed(calling.items())}
    return _done_by(backend, list(first.values()), prepare, timeout_s)


def everywhere(backend: Backend, prepare: Callable[[], str | None], *, timeout_s: float = 600.0) -> list[str]:
    """The same on every rank: all know what went wrong on any. All ranks must call it."""
    return _done_by(backend, list(_calling(backend)), prepare, timeout_s)


def _calling(backend: Backend) -> dict[int, str]:
    """The ranks that come by here, and their nodes: where ranks come and go, others have been through this."""
    return {rank: peer.node for rank, peer in enumerate(backend.session.peers) if not peer.past_worlds}


def _done_by(backend: Backend, ranks: list[int], prepare: Callable[[], str | None], timeout_s: float) -> list[str]:
    """Runs `prepare` on these ranks, and waits for all of them."""
    rank, store, call = backend.world.rank, backend.session.store, f"once.{next(_CALLS)}"
    if rank in ranks:
        store.set(f"{call}.{rank}", json.dumps(_attempt(prepare)))
    trouble = []
    for other in ranks:
        key = f"{call}.{other}"
        try:
            store.wait([key], timedelta(seconds=timeout_s))
        except RuntimeError:
            raise DataError(
                f"Rank {other} has not finished preparing the data for the others of its node in {timeout_s:g} s. "
                f"See what it printed; or get the data before the job starts, and pass --data-dir"
            ) from None  # whose own text has the store's keys, which begin with the token
        trouble.append(json.loads(store.get(key)))
    return [found for found in trouble if found is not None]


def _attempt(prepare: Callable[[], str | None]) -> str | None:
    try:
        return prepare()
    except DataError as error:
        return str(error)
    except Exception as error:
        # Whatever it was, the other ranks wait for an answer.
        return f"{type(error).__name__}: {error}"
