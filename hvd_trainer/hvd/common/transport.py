"""The connections of one process set: Gloo for CPU tensors, the accelerator's library for its own, and a mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hvd_trainer.backends import process_group
from hvd_trainer.backends.session import Session
from hvd_trainer.hvd.common.mesh import Mesh
from hvd_trainer.utils import accelerator
from hvd_trainer.utils.members import CHECK_S

CPU = torch.device("cpu")


class Transport:
    """Moves tensors between the members of a process set; one thread at a time.

    Args:
        store: of this process set alone.
        member: index of this process in it.
        on_wait: called about every second while this rank waits; may raise to give up.

    Attributes:
        mesh: for messages.
    """

    def __init__(
        self, store: dist.Store, member: int, size: int, session: Session, on_wait: Callable[[], None]
    ) -> None:
        self.member, self.size = member, size
        self._store, self._session, self._on_wait = store, session, on_wait
        self.mesh = Mesh(store, member, size, address=session.address, on_wait=on_wait)
        self._gloo: Any = process_group.standalone_group(store, member, size, CPU)
        self._device_groups: dict[torch.device, Any] = {}

    def group(self, device: torch.device) -> Any:
        """Return the group for tensors on a device. The first call for an accelerator is a collective."""
        if accelerator.is_host(device):
            return self._gloo
        if device not in self._device_groups:
            self._session.prepare_nccl()
            self._device_groups[device] = process_group.standalone_group(
                dist.PrefixStore(f"device {len(self._device_groups)}", self._store), self.member, self.size, device
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

    def all_to_all(
        self, received: Tensor, sent: Tensor, received_sizes: Sequence[int], sent_sizes: Sequence[int]
    ) -> None:
        """Send consecutive parts of a flat tensor to the members, and receive theirs."""
        work = self.group(sent.device).alltoall_base(received, sent, [*received_sizes], [*sent_sizes])
        self.wait(work, sent.device)

    def abort(self) -> None:
        """Break the connections, so that a thread that waits for another rank gets an error."""
        self.mesh.abort()
        for group in (self._gloo, *self._device_groups.values()):
            if group is not None:
                group.abort()

    def close(self) -> None:
        """Free the connections. Nothing may be under way."""
        self.mesh.close()
        for group in self._device_groups.values():
            group.shutdown()  # NCCL's warns where it is only freed
        self._device_groups.clear()
        self._gloo = None
