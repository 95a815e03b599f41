"""The connections of one process set: Gloo for rows and CPU tensors, the accelerator's library for its tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hvd_trainer.backends import process_group
from hvd_trainer.utils import accelerator

CPU = torch.device("cpu")
CHECK_S = 1.0
"""How often a waiting rank looks at what it waits for."""
MAX_DIRECT_MEMBERS = 16
"""Up to so many members rows are sent directly to each other: one hop, and as many messages as members."""


class Transport:
    """Moves bytes between the members of a process set; one thread at a time.

    Args:
        store: of this process set alone.
        member: index of this process in it.
        size: number of members.
        on_wait: called about every second while this rank waits; may raise to give up.
    """

    def __init__(self, store: dist.Store, member: int, size: int, on_wait: Callable[[], None]) -> None:
        self.member, self.size = member, size
        self._store, self._on_wait = store, on_wait
        self._gloo: Any = process_group.standalone_group(store, member, size, CPU)
        self._device_groups: dict[torch.device, Any] = {}
        self._rows = torch.empty(0, dtype=torch.uint8)
        self._sent = self._rows

    def group(self, device: torch.device) -> Any:
        """Return the group for tensors on a device. The first call for an accelerator is a collective."""
        if accelerator.is_host(device):
            return self._gloo
        if device not in self._device_groups:
            self._device_groups[device] = process_group.standalone_group(
                dist.PrefixStore("device", self._store), self.member, self.size, device
            )
        return self._device_groups[device]

    def wait(self, work: Any, device: torch.device = CPU) -> None:
        """Wait until an exchange is done; on an accelerator, make the current stream wait for it.

        Raises:
            RuntimeError: a connection is broken.
        """
        if not accelerator.is_host(device):
            work.wait()
            return
        while True:
            try:
                work.wait(timedelta(seconds=CHECK_S))
            except RuntimeError:
                if not work.is_completed():  # only the time is up, and the exchange goes on
                    self._on_wait()
                    continue
                # It has failed, or it was done just after the time was up: what it came to is here.
                work.wait()
            return

    def exchange_rows(self, row: Tensor) -> Tensor:
        """Return the rows (uint8, same size) of all members, in memory that the next call overwrites."""
        if self._rows.numel() != self.size * len(row):
            self._rows = torch.empty(self.size, len(row), dtype=torch.uint8)
            self._sent = torch.empty_like(self._rows)
        if self.size == 1:
            self._rows[0] = row
        elif self.size <= MAX_DIRECT_MEMBERS:
            self._sent.copy_(row.expand_as(self._sent))
            self.wait(self._gloo.alltoall_base(self._rows, self._sent, [], []))
        else:
            self.wait(self._gloo._allgather_base(self._rows.view(-1), row))
        return self._rows

    def exchange_bytes(self, mine: bytes, sizes: Sequence[int]) -> list[bytes]:
        """Return the byte strings of all members, whose sizes are known."""
        longest = max(sizes)
        sent = torch.frombuffer(bytearray(mine.ljust(longest)), dtype=torch.uint8)
        received = torch.empty(self.size, longest, dtype=torch.uint8)
        self.wait(self._gloo._allgather_base(received.view(-1), sent))
        return [row[:size].numpy().tobytes() for row, size in zip(received, sizes, strict=True)]

    def abort(self) -> None:
        """Break the connections, so that a thread that waits for another rank gets an error."""
        for group in (self._gloo, *self._device_groups.values()):
            if group is not None:
                group.abort()

    def close(self) -> None:
        """Free the groups. Nothing may be under way."""
        self._device_groups.clear()
        self._gloo = None
