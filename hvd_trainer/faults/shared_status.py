"""Shared memory with a rank's step and phase, which other processes of the machine can read after its death."""

from __future__ import annotations

import mmap
import os
import struct
from contextlib import suppress
from pathlib import Path

PHASES = (
    *("start", "data", "forward", "backward", "collective", "step", "save", "evaluate", "epoch", "callback"),
    *("script", "trained", "end"),
)
_LAYOUT = struct.Struct("qB")


class SharedStatus:
    """Step and phase in memory that processes of one user on one machine share.

    Args:
        writable: whether this process is the rank itself, whose `descriptor` stays open for others.
    """

    def __init__(self, descriptor: int, *, writable: bool) -> None:
        self.descriptor = descriptor if writable else None
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        self._memory = mmap.mmap(descriptor, _LAYOUT.size, access=access)

    @classmethod
    def create(cls) -> SharedStatus:
        """Return new memory."""
        descriptor = os.memfd_create("hvd_trainer-activity")
        os.ftruncate(descriptor, _LAYOUT.size)
        return cls(descriptor, writable=True)

    @classmethod
    def open(cls, pid: int, descriptor: int) -> SharedStatus | None:
        """Return the memory of another process; None if it cannot be opened."""
        with suppress(OSError, ValueError), Path(f"/proc/{pid}/fd/{descriptor}").open("rb") as file:
            return cls(file.fileno(), writable=False)
        return None

    def write(self, step: int, phase: str) -> None:
        """Set step and phase: half a microsecond, so that it can be done several times per step."""
        _LAYOUT.pack_into(self._memory, 0, step, PHASES.index(phase))

    def read(self) -> tuple[int, str]:
        """Return step and phase."""
        step, phase = _LAYOUT.unpack_from(self._memory)
        return step, PHASES[phase]

    def close(self) -> None:
        self._memory.close()
        if self.descriptor is not None:
            os.close(self.descriptor)
