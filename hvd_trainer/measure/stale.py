"""Tell whether a run is stale: whether this package, or a file that the run has read, is another one now."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

MAX_BYTES = 2**22
"""The largest file that is read; a larger one is the same as long as its size and time are."""
CHANGED = "written while it was read"
"""Stands for the digest of a file of which nobody knows what a run has read."""
PACKAGE = Path(__file__).resolve().parents[1]


@cache
def digest_of_package() -> str:
    """Return the SHA-256 of all code of this package, without which no job is measured."""
    files = sorted(PACKAGE.rglob("*.py"))
    return hashlib.sha256("".join(map(digest, files)).encode()).hexdigest()


def digests(names: Iterable[str]) -> dict[str, str]:
    """Return the digest of each of the names that is a file."""
    files = {name: digest(Path(name)) for name in sorted(set(names))}
    return {name: text for name, text in files.items() if text}


def digests_of_read(times: Mapping[str, set[int]]) -> dict[str, str]:
    """Return the digest of each file that a run has read.

    Args:
        times: of the file in nanoseconds, at each moment that it was read; one with another time now is `CHANGED`.
            They are not compared with a clock: that of the file's disk may be another one.
    """
    return {
        name: text if times[name] == {os.stat(name).st_mtime_ns} else CHANGED
        for name, text in digests(times).items()
    }


def digest_of_files(words: Iterable[str]) -> dict[str, str]:
    """Return the digest of each file that is named among words, such as `--config=own.yaml`."""
    return digests(name for word in words for name in (word, word.partition("=")[2]))


def has_changed(read: Mapping[str, str]) -> bool:
    """Return whether any of these files, by its path with its digest, is another one now, or is gone."""
    return any(digest(Path(name)) != then for name, then in read.items())


def digest(file: Path) -> str:
    """Return the SHA-256 of a file's name and content, or of a large one's name, size and time.

    Empty if there is no such file, or it cannot be read.
    """
    with suppress(OSError, ValueError):  # a name from a file may be none
        status = file.stat()
        if stat.S_ISREG(status.st_mode):
            return _digest(file, status.st_size, status.st_mtime_ns)
    return ""


@cache
def _digest(file: Path, size: int, time_ns: int) -> str:
    """Return the digest of a file that has this size and time: the runs of one command have read the same ones."""
    content = b""
    if size:  # those of the kernel have none, and reading may wait for ever
        content = str(time_ns).encode() if size > MAX_BYTES else file.read_bytes()
    return hashlib.sha256(f"{file.name} {size} ".encode() + content).hexdigest()
