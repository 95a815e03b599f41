"""Limits of glibc's malloc, raised so that the memory of freed tensors stays in the process for the next step.

By default glibc returns freed memory to the system: large blocks one by one, and the free end of its heap. The
next step gets it back page by page, each zeroed by the kernel: a step of MNIST's CNN took 32 to 42 ms instead of
24 on one machine. How much varies, because glibc raises its limits by what the process happened to free before.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameter numbers of `mallopt`, from glibc's malloc.h."""
TRIM_THRESHOLD_BYTES = 2**30
"""How much may be free at the end of the heap."""
MMAP_THRESHOLDS_BYTES = (2**29, 2**25)
"""From which size on a block is mapped by itself: preferred, and the maximum of glibc before 2.35."""
USER_SETTINGS = (
    *("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_"),
    "GLIBC_TUNABLES",
)
"""Variables by which users set these limits themselves."""


def keep_freed_memory(environ: Mapping[str, str]) -> None:
    """Raise glibc's limits for this process, unless the user has set some; without glibc do nothing."""
    if any(name in environ for name in USER_SETTINGS):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    # Setting one limit stops glibc from raising the others by itself, so all are set or none.
    if any(mallopt(M_MMAP_THRESHOLD, size) for size in MMAP_THRESHOLDS_BYTES):
        mallopt(M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES)
