"""How much memory a training has taken."""

from __future__ import annotations

import resource

import psutil
import torch

from hvd_trainer.backends import Backend

MB = 2**20


class PeakMemory:
    """From now on: of the GPU where there is one, else of the process.

    Args:
        backend: the engine.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        if backend.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(backend.device)
            self._base = torch.cuda.memory_allocated(backend.device)
        else:
            self._base = psutil.Process().memory_info().rss

    def figures(self) -> dict[str, float]:
        """Of the rank that took most, in MB: what it had to begin with, and its peak. A collective.

        On CPUs the peak is that of the whole process since its start, which is all that the system keeps.
        """
        device = self._backend.device
        if device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(device)
        else:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        most, base = max(self._backend.all_gather_object((peak, self._base)))
        return {"peak_memory_mb": round(most / MB, 2), "base_memory_mb": round(base / MB, 2)}
