"""Horovod's process sets, one for each list of ranks that has a group.

All ranks of Horovod must add a process set, and `dist.new_group` makes a group on its members only. So their first
rank writes a request to the store, and a thread of every rank carries out all requests in their order.

A set stays until Horovod ends: made again of the same ranks, it would wait for the connections of the first one.
"""

from __future__ import annotations

import json
import threading
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch.distributed as dist

from hvd_trainer.errors import first_line
from hvd_trainer.utils.threads import start_thread

UNLIMITED = timedelta(days=365)
"""A wait that ends at its time limit spoils the connection to a TCPStore, so the thread ends at a request."""
Ranks = tuple[int, ...]


class ProcessSets:
    """The process sets of all groups.

    Args:
        hvd: `horovod.torch`, initialised with dynamic process sets.
        store: that all ranks share.
    """

    def __init__(self, hvd: ModuleType, store: dist.Store, rank: int, size: int) -> None:
        self._hvd, self._store, self._rank, self._size = hvd, store, rank, size
        self._sets: dict[Ranks, Any] = {tuple(range(size)): hvd.global_process_set}
        self._requests: dict[Ranks, int] = {}
        self._num_done = 0
        self._failure: str | None = None
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        if size > 2:  # else every group is all ranks, or one
            requests = store.clone()  # while one thread waits, others that share its connection do
            requests.set_timeout(UNLIMITED)
            self._thread = start_thread(self._run, "horovod-process-sets", requests)

    def acquire(self, ranks: Ranks, group_store: dist.Store, timeout_s: float) -> Any:
        """Return the process set of a new group. A collective of its members.

        Args:
            ranks: the members, in ascending order.
            group_store: a store of the group's own.
            timeout_s: how long it may take.

        Raises:
            torch.distributed.DistBackendError: not all ranks of the job added it.
        """
        if len(ranks) == self._size:
            return self._hvd.global_process_set
        if len(ranks) == 1:
            return None
        if self._rank == ranks[0]:
            if ranks not in self._requests:
                self._requests[ranks] = self._request("add", ranks)
            group_store.set("process_set", str(self._requests[ranks]))
        number = int(group_store.get("process_set"))
        with self._changed:
            self._changed.wait_for(lambda: self._num_done >= number or self._failure is not None, timeout_s)
            if self._num_done < number:
                raise dist.DistBackendError(
                    f"Horovod has no process set of ranks {list(ranks)} after {timeout_s:g} s, because not all "
                    f"ranks of the job have added it: {self._failure or 'one of them is gone, or stuck'}"
                )
            return self._sets[ranks]

    def leave(self) -> None:
        """Let the thread end; Horovod's end ends what it waits for."""
        if self._thread is not None and self._thread.is_alive():
            self._request("leave", (self._rank,))

    def join(self) -> None:
        """Wait for the thread's end."""
        if self._thread is not None:
            self._thread.join()

    def _request(self, action: str, ranks: Ranks) -> int:
        number = self._store.add("process_sets/number", 1)
        self._store.set(f"process_sets/{number}", json.dumps([action, *ranks]))
        return number

    def _run(self, store: dist.Store) -> None:
        try:
            while True:
                action, *ranks = json.loads(store.get(f"process_sets/{self._num_done + 1}"))
                if action == "add":
                    self._sets[tuple(ranks)] = self._hvd.add_process_set(ranks)
                elif ranks == [self._rank]:
                    return
                with self._changed:
                    self._num_done += 1
                    self._changed.notify_all()
        except Exception as error:  # the store or Horovod has ended: for who waits for a process set
            with self._changed:
                self._failure = first_line(error)
                self._changed.notify_all()
