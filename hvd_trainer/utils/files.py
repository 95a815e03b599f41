"""Files that may come from elsewhere, read within limits; and files written whole or not at all.

What is written follows the user's umask. So `tempfile` is no help, which gives its files to their owner alone: a
rename would keep that.
"""

from __future__ import annotations

import errno
import os
import pickle
import secrets
import stat
import struct
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def open_plain(file: Path) -> Iterator[BinaryIO]:
    """Opens a file to read that lies on a disk. A pipe would be waited for, and a device never ends.

    Raises:
        OSError: it is not there, or is something else.
    """
    with open(file, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as opened:
        if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is a pipe or a device, and not a file", str(file))
        yield opened


UNREADABLE = (
    *(OSError, EOFError, MemoryError, RecursionError, zipfile.BadZipFile, struct.error),
    *(RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError, OverflowError),
    pickle.UnpicklingError,
)
"""What PyTorch's reader raises over a file that is none of its own."""


def read_plain(file: Path, most_bytes: int) -> bytes:
    """All of a file, which may not be longer than so many bytes.

    Raises:
        OSError: it cannot be read.
        ValueError: it is longer.
    """
    with open_plain(file) as opened:
        content = opened.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise ValueError(f"it is far too long: more than {most_bytes:,} bytes")
    return content


def no_place_to_write(folder: Path, names: Iterable[str]) -> str | None:
    """What of these, or in them, is no plain file and no folder; None if there is nothing.

    A folder that was unpacked from somebody's archive may hold links, and what is written through them destroys
    files of this user anywhere.
    """
    places = [folder / name for name in names]
    inside = (path for place in places if place.is_dir() and not place.is_symlink() for path in place.rglob("*"))
    for path in (*places, *inside):
        if path.is_symlink() or (path.exists() and not (path.is_file() or path.is_dir())):
            return f"{path} is a link, or no file. Remove it, or name another folder"
    return None


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """A new, empty file, which takes the place of `file` when the block has ended well; else it is gone.

    It is exclusively made beside `file`: where others may write, too, no link of theirs is followed.

    Raises:
        OSError: it cannot be made, or cannot take the place.
    """
    temporary = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
    with temporary.open("xb") as made:
        mode = stat.S_IMODE(os.fstat(made.fileno()).st_mode)
    try:
        yield temporary
        # safetensors puts a file for its owner alone in the place of the one that it is to write.
        temporary.chmod(mode)
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)
