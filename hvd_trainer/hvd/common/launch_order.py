"""One order, the same on all ranks, in which the exchanges of all process sets begin on accelerators.

A kernel of NCCL holds its place on a GPU until those of the other ranks have come. If one rank begins the exchange
of a first set before that of a second one, and another rank the other way round, both may wait for ever. Horovod
has one thread per rank that asks all sets in turn; here each has rounds of its own, which wait for no other set.
So members agree on a number before they begin: each proposes one above all that it knows, and the greatest counts.
A rank begins in the order of the numbers, and waits while another set may yet get a lower one. (D. Skeen's ordered
multicast, in K. Birman and T. Joseph, "Reliable communication in the presence of failures", ACM TOCS 1987.)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager

import torch

from hvd_trainer.utils.members import CHECK_S


class LaunchOrder:
    """The turns of a rank's process sets, and the streams that they have in common.

    Args:
        sets: the job's process sets, the same on all ranks; one alone needs no turns.
    """

    def __init__(self, sets: Sized) -> None:
        self._sets = sets
        self._state = threading.Condition()
        self._last = 0
        self._turns: dict[int, tuple[int, int]] = {}
        """number and id of each set that is about to begin; a number that is only proposed can grow"""
        self._streams: dict[torch.device, torch.Stream] = {}

    def stream(self, device: torch.device) -> torch.Stream:
        """Return the stream of a device for exchanges, in which those that began earlier run earlier."""
        if device not in self._streams:
            self._streams[device] = torch.Stream(device)
        return self._streams[device]

    @contextmanager
    def turn(self, set_id: int, agree: Callable[[int], int], on_wait: Callable[[], None]) -> Iterator[None]:
        """Begin exchanges of a process set inside the context; its members all come to it, one thread of each.

        Args:
            agree: returns the greatest of the members' numbers.
            on_wait: called about every second while another set has its turn; may raise to give up.
        """
        if len(self._sets) == 1:
            yield
            return
        with self._state:
            self._last += 1
            number = self._last
            self._turns[set_id] = number, set_id
        try:
            number = agree(number)
            with self._state:
                self._last = max(self._last, number)
                self._turns[set_id] = number, set_id
                self._state.notify_all()
                while not self._state.wait_for(lambda: min(self._turns.values())[1] == set_id, CHECK_S):
                    on_wait()
            yield
        finally:
            with self._state:
                del self._turns[set_id]
                self._state.notify_all()
