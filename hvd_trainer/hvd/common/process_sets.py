"""Process sets: some of the ranks, which run operations of their own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from hvd_trainer.hvd.common import basics
from hvd_trainer.hvd.common.request import Kind
from hvd_trainer.hvd.common.util import is_iterable

NEEDS_DYNAMIC = (
    f"Set {basics.DYNAMIC_SETS}=1, or call hvd.init(process_sets='dynamic'), to add or remove process sets after "
    f"hvd.init()."
)


class ProcessSet:
    """Some of the ranks. Pass it to `hvd.init` or `hvd.add_process_set`, then to operations.

    Args:
        ranks_or_comm: global ranks; MPI communicators cannot be had here.

    Attributes:
        process_set_id: its number; None until it is registered.
        ranks: global ranks of the members, in order.
        mpi_comm: always None.

    Raises:
        ValueError: not a list of ranks.
    """

    process_set_id: int | None = None
    ranks: list[int] | None = None
    mpi_comm: Any = None

    def __init__(self, ranks_or_comm: Sequence[int]) -> None:
        if not is_iterable(ranks_or_comm):
            raise ValueError("A ProcessSet is made of a list of ranks; MPI communicators are not supported.")
        ranks = sorted(ranks_or_comm)
        if any(not isinstance(rank, int) for rank in ranks):
            raise ValueError(f"A ProcessSet is made of a list of ranks, which are integers, not {ranks}.")
        self.ranks = ranks

    def size(self) -> int | None:
        """Return the number of members; None if it is not registered."""
        if self.process_set_id is None:
            return None
        return len(basics.runtime().ranks_of(self.process_set_id))

    def rank(self) -> int | None:
        """Return this process's number among the members; None if it is not registered.

        Raises:
            ValueError: this process is not a member.
        """
        if self.process_set_id is None:
            return None
        ranks = basics.runtime().ranks_of(self.process_set_id)
        if basics.rank() not in ranks:
            raise ValueError("Process is not part of provided process set.")
        return ranks.index(basics.rank())

    def included(self) -> bool | None:
        """Return whether this process is a member."""
        return None if self.ranks is None else basics.rank() in self.ranks

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"


global_process_set = ProcessSet([])
"""All ranks."""
global_process_set.process_set_id = 0


def init(comm: Sequence[int] | None = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Find the other ranks, and register process sets; does nothing if it has been done. A collective.

    Args:
        comm: None or all ranks; other subsets and MPI communicators are not supported.
        process_sets: to register; "dynamic": none now, and `add_process_set` is allowed.

    Raises:
        LaunchError: the launcher's variables contradict each other, or the ranks could not meet.
        ValueError: two process sets have the same ranks, or ranks were given different sets.
    """
    if isinstance(process_sets, str) and process_sets.lower() == "dynamic":
        os.environ[basics.DYNAMIC_SETS] = "1"
        process_sets = None
    sets: list[ProcessSet] = [] if process_sets is None or isinstance(process_sets, str) else list(process_sets)
    for index, process_set in enumerate(sets):
        if not isinstance(process_set, ProcessSet):
            raise ValueError(f"process_sets has {process_set!r}, which is not a ProcessSet.")
        if process_set.ranks in [other.ranks for other in sets[:index]]:
            raise ValueError(f"process_sets has two sets of the same ranks: {process_set}")
    if comm is not None and not is_iterable(comm):
        raise ValueError("MPI communicators are not supported here: leave comm out.")
    if not basics.start([process_set.ranks or [] for process_set in sets]):
        return
    if comm and sorted(comm) != list(range(basics.size())):
        raise ValueError(f"comm must have all ranks or be left out, not {list(comm)}. Use a ProcessSet for some.")
    ids = {tuple(ranks): set_id for set_id, ranks in basics.runtime().set_ranks.items()}
    global_process_set.ranks = list(range(basics.size()))
    for process_set in sets:
        process_set.process_set_id = ids[tuple(process_set.ranks or ())]


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Register a process set after `init`, and return it. A collective of all ranks.

    Raises:
        ValueError: before `init`, without HOROVOD_DYNAMIC_PROCESS_SETS=1, for ranks that do not exist, or if there
            is a set of these ranks.
    """
    size = basics.size()
    if os.environ.get(basics.DYNAMIC_SETS) != "1":
        raise ValueError(NEEDS_DYNAMIC)
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    ranks = process_set.ranks or []
    if len(set(ranks)) < len(ranks) or any(not 0 <= rank < size for rank in ranks):
        raise ValueError(f"Ranks of a process set are different and from 0 to {size - 1}, not {ranks}.")
    set_id = basics.runtime().change_set(Kind.ADD_SET, ranks)
    if set_id is None:
        raise ValueError(f"Attempted to add a duplicate process set: {process_set}")
    process_set.process_set_id = set_id
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set; return whether there was one to remove. A collective of all ranks.

    Raises:
        ValueError: before `init`, or without HOROVOD_DYNAMIC_PROCESS_SETS=1.
    """
    if not process_set.process_set_id:
        return False
    if os.environ.get(basics.DYNAMIC_SETS) != "1":
        raise ValueError(NEEDS_DYNAMIC)
    ranks = basics.runtime().ranks_of(process_set.process_set_id)
    process_set.process_set_id = None
    return basics.runtime().change_set(Kind.REMOVE_SET, ranks) is not None
