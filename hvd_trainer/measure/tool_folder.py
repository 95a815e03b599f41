"""The folder of a tool: a tool removes and overwrites only what is in a folder that is marked as the tool's.

OUT/.hvd-trainer-folder    whose folder it is; locked while a command uses it
OUT/runs.jsonl             one line per run that has ended
OUT/running/               what the present run writes: metrics, weights, output; gone after it
OUT/failed/                the output of each run that failed, by its line in runs.jsonl

A folder inside has such a marker, too. One with files and without a marker is somebody else's, and is refused.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from hvd_trainer.errors import OptionError
from hvd_trainer.measure.start import end_processes, exit_on_signals
from hvd_trainer.utils.files import find_file_in_the_way, find_unsafe_path, read_regular

MARKER = ".hvd-trainer-folder"
"""The file that says whose folder it lies in."""
FULL = (errno.ENOSPC, errno.EDQUOT)
"""Error codes of a full disk, and of a quota that is used up."""
MAX_BYTES = 1000
"""The longest marker that is read."""


@contextmanager
def locked_folder(out: Path, tool: str) -> Iterator[Path]:
    """Lock the folder of --out for this command while the context is open, and yield its absolute path.

    A new or empty folder becomes the tool's. On exit, whatever runs in the folder is ended.

    Raises:
        OptionError: it is not the tool's, another command is using it, or it cannot be written to (any more).
    """
    folder = out.expanduser().resolve()
    try:
        if file := find_file_in_the_way(folder):
            raise OptionError(f"--out {folder}: {file}")
        folder.mkdir(parents=True, exist_ok=True)
        marker = _open_marker(folder, tool)
    except OSError as error:
        raise OptionError(f"--out {folder} cannot be written to: {error}") from error
    with marker:
        try:
            fcntl.lockf(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise OptionError(
                f"--out {folder}: another one is using it. Wait for its end, or name another folder ({error})"
            ) from None
        _claim(marker, folder, tool)
        with exit_on_signals():
            try:
                clear(folder)
                yield folder
            except OSError as error:
                if error.errno not in FULL:
                    raise
                raise OptionError(
                    f"--out {folder} cannot be written to any more: {error}. Free space, or name another folder"
                ) from error
            finally:
                clear(folder)


def running(folder: Path) -> Path:
    """Return the folder into which the present run writes."""
    return folder / "running"


def clear(folder: Path) -> None:
    """Remove the files and end the processes of a run in this folder, also of one whose command was killed."""
    end_processes(folder)
    remove_inner(running(folder))


def make_inner(path: Path) -> Path:
    """Make a folder inside that of a tool, unless it is there, and return it.

    Raises:
        OptionError: there is one that is not the tool's, or it cannot be made.
    """
    if not _is_own(path):
        try:
            path.mkdir(parents=True, exist_ok=True)
            mark_inner(path, like=path.parent)
        except OSError as error:
            raise OptionError(f"{path} cannot be made: {error}") from error
    return path


def mark_inner(path: Path, like: Path) -> None:
    """Mark a folder as one of the tool to which the folder `like` belongs."""
    (path / MARKER).write_text(_owner(like) or "")


def remove_inner(path: Path) -> None:
    """Remove a folder inside that of a tool, if there is one.

    Raises:
        OptionError: it is not the tool's.
    """
    if not _is_own(path):
        return
    # The marker goes last: what a kill leaves of the folder is still known as the tool's.
    for entry in path.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        elif entry.name != MARKER:
            entry.unlink()
    with suppress(OSError):  # a folder that may not be emptied keeps its marker
        if [entry.name for entry in path.iterdir()] in ([MARKER], []):
            (path / MARKER).unlink(missing_ok=True)
            path.rmdir()


def _is_own(path: Path) -> bool:
    """Return whether a folder inside that of a tool is the tool's; an empty one may be; False if there is none.

    Raises:
        OptionError: it is not.
    """
    if not os.path.lexists(path):
        return False
    is_folder = path.is_dir() and not path.is_symlink()
    if not is_folder or (_owner(path) != (_owner(path.parent) or "") and any(path.iterdir())):
        raise OptionError(
            f"{path} was not made by this tool, which needs the place. Move it, or name another folder by --out"
        )
    return True


def _owner(folder: Path) -> str | None:
    """Return the text of a folder's marker; None if it has none that can be read."""
    with suppress(OSError, ValueError):
        return read_regular(folder / MARKER, MAX_BYTES).decode()
    return None


def _open_marker(folder: Path, tool: str) -> IO[str]:
    """Open the marker of a folder, which a new or empty one gets.

    Raises:
        OptionError: it is somebody else's, or has links.
        OSError: it cannot be written to.
    """
    names = sorted(path.name for path in folder.iterdir())
    if names and MARKER not in names:
        raise OptionError(
            f"--out {folder} has files that {tool} did not write, such as {names[0]}: they would be in danger. "
            f"Name a new or an empty folder"
        )
    # Other folders are removed when the next run begins.
    files = [name for name in names if (folder / name).is_symlink() or not (folder / name).is_dir()]
    if strange := find_unsafe_path(folder, [*files, "failed"]):
        raise OptionError(f"--out {folder} cannot be written to: {strange}")
    return (folder / MARKER).open("a+", errors="replace")


def _claim(marker: IO[str], folder: Path, tool: str) -> None:
    """Write whose folder it is into its marker, or check what is written there.

    Raises:
        OptionError: it is that of another tool.
    """
    text = f"This folder belongs to hvd-trainer {tool}, which overwrites and removes what is in it.\n"
    marker.seek(0)
    known = marker.read(MAX_BYTES)
    if not known and [path.name for path in folder.iterdir()] == [MARKER]:
        marker.write(text)
        marker.flush()
    elif known != text:
        raise OptionError(f"--out {folder}: it belongs to another tool, says {MARKER} there. Name another folder")
