"""The peak of a process's resident memory inside a block."""

from __future__ import annotations

import ctypes
from pathlib import Path


class PeakMemory:
    """Measure by how much resident memory grows inside a `with` block at most, as Linux counts it.

    Attributes:
        grown_bytes: the peak inside the block, less what was there at its beginning.
    """

    def __enter__(self) -> PeakMemory:
        ctypes.CDLL(None).malloc_trim(0)  # or new tensors would take memory that is counted already
        Path("/proc/self/clear_refs").write_text("5")  # the peak is what is resident now
        self._before = _resident_bytes("VmRSS")
        return self

    def __exit__(self, *_: object) -> None:
        self.grown_bytes = _resident_bytes("VmHWM") - self._before


def _resident_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))
