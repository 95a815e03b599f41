"""Find NCCL's header and library where PyTorch's wheels, Debian, NVIDIA's images and CUDA's toolkits have them.

home                          header      library
.../site-packages/nvidia/nccl include     lib
/usr (Debian, NGC)            include     lib/x86_64-linux-gnu
/usr (RHEL, SUSE)             include     lib64
/usr/local/cuda               include     targets/x86_64-linux/lib, lib64
"""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

LIBRARY_NAMES = ("libnccl.so.2", "libnccl.so")
LIBRARY_FOLDERS = ("lib", "lib64", f"lib/{platform.machine()}-linux-gnu", "targets/*/lib")


@dataclass(frozen=True)
class Nccl:
    """The folder with nccl.h, the library's file, and the version that the header names."""

    include: Path
    library: Path
    version: str


def find_nccl(homes: Iterable[str | Path]) -> Nccl | None:
    """Return the NCCL of the first of `homes` that has both header and library."""
    for home in map(Path, homes):
        header = home / "include/nccl.h"
        library = _library(home)
        if header.is_file() and library is not None:
            return Nccl(header.parent, library, _version(header))
    return None


def _library(home: Path) -> Path | None:
    folders = (path for pattern in LIBRARY_FOLDERS for path in sorted(home.glob(pattern)))
    files = (folder / name for folder in folders for name in LIBRARY_NAMES)
    return next((file for file in files if file.is_file()), None)


def _version(header: Path) -> str:
    text = header.read_text(encoding="utf-8")
    parts = dict(re.findall(r"^\s*#define NCCL_(MAJOR|MINOR|PATCH) (\d+)", text, re.MULTILINE))
    return ".".join(parts.get(name, "?") for name in ("MAJOR", "MINOR", "PATCH"))
