"""Measure the peak memory of a training."""

from __future__ import annotations

import resource

import psutil
import torch

from hvd_trainer.backends import Backend
from hvd_trainer.utils import accelerator

MB = 2**20


class PeakMemory:
    """Measure peak memory from construction on: of the accelerator, or of the process where there is none."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        if accelerator.is_host(backend.device):
            self._base = psutil.Process().memory_info().rss
        else:
            torch.accelerator.reset_peak_memory_stats(backend.device)
            self._base = torch.accelerator.memory_allocated(backend.device)

    def figures(self) -> dict[str, float]:
        """Return the base and the peak, in MB, of the rank with the highest peak. A collective.

        On CPUs the peak is that of the whole process since its start, which is all that the system keeps.
        """
        own = peak_bytes(self._backend.device), self._base
        peak, base = max(self._backend.collectives.all_gather_object(own))
        return {"peak_memory_mb": round(peak / MB, 2), "base_memory_mb": round(base / MB, 2)}


def peak_bytes(device: torch.device) -> int:
    """Return the peak memory of this process in bytes: of the accelerator that it trains on, else of the host."""
    if accelerator.is_host(device):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in kB
    return torch.accelerator.max_memory_allocated(device)
