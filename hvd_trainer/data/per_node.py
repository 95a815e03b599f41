"""Work that one rank per node does for all ranks of that node, such as downloads and caches."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

from hvd_trainer.backends import Backend
from hvd_trainer.errors import DataError, OptionError

T = TypeVar("T")


class SharedDataError(DataError, OptionError):
    """An error in the data that all ranks raise alike, so that only rank 0 prints it."""


def once_per_node(backend: Backend, prepare: Callable[[], str | None], *, timeout_s: float = 600.0) -> list[str]:
    """Run `prepare` on the first rank of each node while the others wait. A collective.

    They wait at the session's store, not in the engine, whose time limit may be shorter than a download and which
    may poll meanwhile.

    Args:
        prepare: returns None, or what is wrong. An exception counts as that, too.
        timeout_s: how long the others wait, in seconds.

    Returns:
        What went wrong, one entry per node that failed, the same on all ranks; empty if all is well.

    Raises:
        DataError: a node was not done in time.
    """
    calling = participants(backend)
    first = {node: rank for rank, node in reversed(calling.items())}
    return _run_on(backend, list(first.values()), prepare, timeout_s)


def on_every_rank(backend: Backend, load: Callable[[], T], *, timeout_s: float = 600.0) -> T:
    """Return what `load` returns on this rank, once all ranks have called it. A collective.

    Raises:
        SharedDataError: it has raised on some rank; on all ranks, so that none waits for that one.
        DataError: a rank was not done in time.
    """
    loaded: list[T] = []
    trouble = _run_on(backend, list(participants(backend)), lambda: loaded.append(load()), timeout_s)
    if trouble:
        raise SharedDataError(trouble[0])
    return loaded[0]


def participants(backend: Backend) -> dict[int, str]:
    """Return the node of each rank that takes part.

    In elastic mode ranks of earlier worlds train while one that joins them comes from its start to its training:
    they have done until there what it does. From then on all ranks do the same.
    """
    session = backend.session
    return {
        rank: peer.node for rank, peer in enumerate(session.peers) if session.has_trained or not peer.past_worlds
    }


def next_call(backend: Backend, name: str) -> str:
    """Return a key in the store for a call that all participants make: they count alike, in each world from 0."""
    when = "training" if backend.session.has_trained else "start"
    return f"{name}.{when}.{backend.session.store.add(f'{name}.{when}.of.{backend.world.rank}', 1)}"


def _run_on(backend: Backend, ranks: list[int], prepare: Callable[[], str | None], timeout_s: float) -> list[str]:
    """Run `prepare` on these ranks, and wait for all of them."""
    rank, store, call = backend.world.rank, backend.session.store, next_call(backend, "once")
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
    return [text for text in trouble if text is not None]


def _attempt(prepare: Callable[[], str | None]) -> str | None:
    try:
        return prepare()
    except DataError as error:
        return str(error)
    except Exception as error:
        # Whatever it is, the other ranks wait for an answer.
        return f"{type(error).__name__}: {error}"
