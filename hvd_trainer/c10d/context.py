"""Horovod among the ranks of torch.distributed's default group."""

from __future__ import annotations

import atexit
import functools
import importlib
import os
import socket
import sys
import threading
from collections import Counter
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from hvd_trainer.backends.horovod_start import Meeting, import_horovod, start_horovod, stop_horovod, tuning
from hvd_trainer.backends.horovod_waiter import Waiter, completes_asynchronously
from hvd_trainer.c10d.process_sets import ProcessSets
from hvd_trainer.c10d.work import Completer, HorovodWork, NameQueue
from hvd_trainer.errors import BackendError
from hvd_trainer.faults import collectives
from hvd_trainer.faults.collectives import CollectiveCall
from hvd_trainer.launch.world import UNKNOWN, World
from hvd_trainer.rendezvous import ranks
from hvd_trainer.rendezvous.ranks import RankInfo
from hvd_trainer.utils.network import LOOPBACK, TEST_NET_ADDRESS, interface_name, outward_address

REQUEST, ALTERNATIVE = 'init_process_group("horovod")', 'call init_process_group("gloo")'
MAX_LEAVE_S = 10.0
"""How long a rank that has destroyed its groups waits for the others: its end ends Horovod on all ranks."""
MAX_COUNTS = 4096
NAMES_PER_KIND = 4
"""How many operations of one kind may be under way at once; more wait for their turn. Horovod answers from its
cache where a name is repeated, which takes as many steps to learn as there are names."""


class HorovodContext:
    """Horovod in this process, and what all groups share.

    Args:
        store: that the ranks share.
        timeout: how long the ranks may take to meet.

    Raises:
        BackendError: Horovod is not installed, or initialised already.
        LaunchError: not all ranks came.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        self.hvd = import_horovod(REQUEST, ALTERNATIVE)
        self.size = size
        meeting = meet(store, rank, size)
        self.interface = interface_name(meeting.address) if size > 1 else None
        start_horovod(
            self.hvd,
            functools.partial(self.hvd.init, process_sets="dynamic" if size > 2 else None),
            meeting,
            timeout_s=timeout.total_seconds(),
            settings=tuning(os.environ, on_nccl=completes_asynchronously(self.hvd)),
            interface=os.environ.get("HOROVOD_GLOO_IFACE"),
        )
        self.operations: ModuleType = importlib.import_module("horovod.torch.mpi_ops")
        self.process_sets = ProcessSets(self.hvd, store, rank, size)
        self.waiter = Waiter(self.hvd, MAX_LEAVE_S)
        self.completer = Completer(self.waiter)
        self._kinds: dict[str, Counter[str]] = {}
        self._begun: Counter[str] = Counter()
        self._queues: dict[str, NameQueue] = {}
        self._last: dict[str, CollectiveCall] = {}
        """of each group"""
        self._lock = threading.Lock()
        self._is_closed = False
        collectives.sources.append(self.calls)

    def number(self, group: str, kind: str) -> tuple[str, int]:
        """Return the name of a group's next operation, and its number in the group, whose ranks all count alike.

        A rank counts for each group on its own: another rank is not in the same groups.
        """
        kinds = self._kinds.setdefault(group, Counter())
        if len(kinds) > MAX_COUNTS:
            kinds.clear()
        kinds[kind] += 1
        self._begun[group] += 1
        return f"{group}.{kind}.{kinds[kind] % NAMES_PER_KIND}", self._begun[group]

    def calls(self) -> list[CollectiveCall]:
        """Return the operations under way, and the last one of each group."""
        return [*(work.record(is_done=False) for work in self.under_way()), *list(self._last.values())]

    def under_way(self, group: str | None = None) -> list[HorovodWork]:
        """Return the operations of a group, or of all, that are not known to be done."""
        # Without a lock: another thread that holds one may be stuck.
        works = [work for queue in list(self._queues.values()) for work in list(queue.works)]
        return [work for work in works if not work.is_done and group in (None, work.group)]

    def begin(self, name: str, **how: Any) -> HorovodWork:
        """Start an operation as soon as its name is free.

        Args:
            how: further arguments of `HorovodWork`.
        """
        with self._lock:
            queue = self._queues.get(name)
            if queue is None:
                queue = self._queues[name] = NameQueue(name, self._forget)
            work = HorovodWork(queue, self.waiter, self.completer, **how)
            self._last[work.group] = work.record(is_done=True)
        work.start()
        return work

    def _forget(self, queue: NameQueue) -> None:
        with self._lock:
            if not queue.works:
                self._queues.pop(queue.name, None)

    def close(self) -> None:
        """End Horovod, once all ranks have come here, or a rank fails, or `MAX_LEAVE_S` have passed."""
        if self._is_closed:
            return
        self._is_closed = True
        collectives.sources.remove(self.calls)
        # The last value is of an exception that ends this process.
        has_failed = sys.exc_info()[0] is not None or hasattr(sys, "last_value")
        if self.size > 1 and not has_failed:
            self._wait_for_all()
        self.process_sets.leave()
        stop_horovod(self.hvd)
        self.process_sets.join()
        self.completer.close()

    def _wait_for_all(self) -> None:
        try:
            flag = torch.zeros(1, dtype=torch.int32)
            handle = self.hvd.allreduce_async_(flag, op=self.hvd.Sum, name="c10d.close")
            self.waiter.wait(handle)
        except (RuntimeError, ValueError, TimeoutError):
            return  # another rank has ended Horovod, or does not come


def meet(store: dist.Store, rank: int, size: int) -> Meeting:
    """Learn of all ranks, whoever started them. A collective.

    They are on one node if their hosts have the same name, in the order of their ranks.
    """
    master = os.environ.get("MASTER_ADDR", TEST_NET_ADDRESS)
    address = outward_address(master, 1)
    me = RankInfo(socket.gethostname(), local_rank=UNKNOWN, backend="horovod", cpus=(), address=address)
    world, peers = ranks.meet(store, World.somewhere(rank, size, REQUEST), me)
    return Meeting(world, peers, store, address if world.num_nodes > 1 else LOOPBACK)


class Contexts:
    """Horovod in this process, or nothing.

    Attributes:
        is_shared: whether the program has called `hvd.init`, too, and so needs Horovod beyond its groups.
    """

    def __init__(self) -> None:
        self.is_shared = False
        self._context: HorovodContext | None = None
        self._num_starts = 0

    def open(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        """Start Horovod: see `HorovodContext`."""
        if self._num_starts == 0:
            atexit.register(self.close)
        self._num_starts += 1
        self.is_shared = False
        self._context = HorovodContext(self.own_keys(store), rank, size, timeout)

    def own_keys(self, store: dist.Store) -> dist.Store:
        """Return a store without the keys of an earlier start: torchrun's outlives the groups."""
        return dist.PrefixStore(f"horovod.{self._num_starts}", store)

    def current(self) -> HorovodContext:
        """Return the running Horovod.

        Raises:
            BackendError: the default group is not Horovod's.
        """
        if self._context is None:
            raise BackendError(
                f'new_group(backend="horovod") needs Horovod among all ranks. Start the job by {REQUEST}.'
            )
        return self._context

    def leave(self) -> None:
        """End Horovod with the default group, unless the program needs it beyond that."""
        if not self.is_shared:
            self.close()

    def close(self) -> None:
        """End Horovod, if it runs."""
        context, self._context = self._context, None
        if context is not None:
            context.close()


contexts = Contexts()
