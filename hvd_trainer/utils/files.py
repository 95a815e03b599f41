"""Files from untrusted sources, read within limits; files that are replaced atomically; and this user's cache.

Written files follow the user's umask. `tempfile` is not used for them: its files are readable by their owner only,
and a rename would keep that.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path


@contextmanager
def open_regular(file: Path) -> Iterator[BufferedReader]:
    """Open a regular file to read. Reading a pipe would block, and a device may never end.

    Raises:
        OSError: it does not exist, or is something else.
    """
    with open(file, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as opened:
        if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is a pipe or a device, and not a file", str(file))
        yield opened


UNREADABLE = (
    *(OSError, MemoryError, RecursionError, RuntimeError, ValueError, TypeError, LookupError),
    *(AttributeError, AssertionError, OverflowError),
)
"""What code raises if it is given content of another form than it was written for, such as a damaged file."""


def read_regular(file: Path, max_bytes: int) -> bytes:
    """Return the content of a regular file of limited length.

    Raises:
        OSError: it cannot be read.
        ValueError: it is longer.
    """
    with open_regular(file) as opened:
        content = opened.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ValueError(f"it is far too long: more than {max_bytes:,} bytes")
    return content


def find_file_in_the_way(folder: Path) -> str | None:
    """Return an error about a file that stands where a folder, or one above it, is to be; else None."""
    for place in (folder, *folder.parents):
        if place.exists() and not place.is_dir():
            return f"{place} is a file, and no folder. Name another one"
    return None


def find_unsafe_path(folder: Path, names: Iterable[str]) -> str | None:
    """Return an error about the first link or special file among these paths, or below them; else None.

    A folder from an untrusted archive may have links in it: writing through them would destroy other files of this
    user.
    """
    paths = [folder / name for name in names]
    inside = (path for top in paths if top.is_dir() and not top.is_symlink() for path in top.rglob("*"))
    for path in (*paths, *inside):
        if path.is_symlink() or (path.exists() and not (path.is_file() or path.is_dir())):
            return f"{path} is a link, or no file. Remove it, or name another folder"
    return None


@contextmanager
def atomic_write(file: Path) -> Iterator[Path]:
    """Yield a new, empty file, which replaces `file` at the end of the context; after an exception it is deleted.

    It is created exclusively, beside `file`: in a folder where others may write, no link of theirs is followed.

    Raises:
        OSError: it cannot be created, or cannot replace `file`.
    """
    temporary = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
    with temporary.open("xb") as made:
        mode = stat.S_IMODE(os.fstat(made.fileno()).st_mode)
    try:
        yield temporary
        # safetensors replaces the file that it writes by one that only its owner may read.
        temporary.chmod(mode)
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomically(file: Path, text: str) -> None:
    """Write a text file whole, or leave what was there.

    Raises:
        OSError: it cannot be written.
    """
    with atomic_write(file) as temporary:
        temporary.write_text(text)


def default_data_dir() -> Path:
    """Return the folder for data sets and their tokens: $XDG_CACHE_HOME (else ~/.cache) /hvd_trainer/data."""
    return _cache_folder() / "data"


def default_wheel_dir() -> Path:
    """Return the folder for built wheels: $XDG_CACHE_HOME (else ~/.cache) /hvd_trainer/wheels."""
    return _cache_folder() / "wheels"


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "hvd_trainer"
