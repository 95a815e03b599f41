"""Start a trial in a folder of its own, in which it finds its user's files and writes none of them.

PLACE/folder                    empty at first: {folder} among the words of the job
PLACE/files/home/me/project     the working folder, in the place of /home/me/project
    train.py -> /home/me/project/train.py
    checkpoints/                a folder of its own, with links to the files of the user's
    data -> /home/me/project/data     a link: it has too many files
PLACE/files/home/me/shared -> /home/me/shared      so that ../shared is found

What would be written through a link is a copy before: `trial_files.py`. Union mounts (overlayfs) do the
same for all programs, but need privileges that containers and clusters do not give.
"""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from hvd_trainer.measure.message import SITE
from hvd_trainer.measure.start import Start
from hvd_trainer.measure.trial_files import FOLDER, OUTSIDE, READ, VARIABLE

MAX_FILES = 2000
"""Files of the working folder that may become links; a folder with more than are left becomes one."""


def in_own_folder(start: Start, place: Path) -> Start:
    """Return how to start a run that leaves its user's files as they are; runs in the same place share theirs."""
    place, user = place.resolve(), Path.cwd()
    folder, files = place / "folder", place / "files"
    cwd = files.joinpath(*user.parts[1:])
    if not folder.exists():
        folder.mkdir(parents=True)
        _link_folders(user, files, place if place.parent == user else place.parent)
    guarded = json.dumps([str(place), str(user), os.path.realpath(_made_by_trials().name)])
    path = os.pathsep.join(filter(None, (str(SITE), os.environ.get("PYTHONPATH", ""))))
    return start._replace(
        command=[word.replace(FOLDER, str(folder)) for word in start.command],
        variables={**start.variables, VARIABLE: guarded, "PYTHONPATH": path, "PWD": str(cwd)},
        cwd=cwd,
    )


@cache
def _made_by_trials() -> Any:
    """Return the file in which the trials of this command list what they make outside of their places."""
    return NamedTemporaryFile(prefix="hvd_trainer-made-")  # noqa: SIM115 it lives as long as the command


def written_outside(place: Path) -> list[str]:
    """Return the paths outside of its place to which a trial has written."""
    return _lines(place / OUTSIDE)


def read_by(place: Path) -> dict[str, set[int]]:
    """Return the user's files that a trial has read, and not written, with their times then, in nanoseconds.

    A file that was written meanwhile has more than one time.
    """
    written, times = {*written_outside(place)}, dict[str, set[int]]()
    for line in _lines(place / READ):
        time_ns, _, path = line.partition(" ")
        if path not in written:
            times.setdefault(path, set()).add(int(time_ns))
    return times


def _lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []


def describe_outside(path: str) -> str:
    """Return the warning about a path to which trials write."""
    return (
        f"the job writes to {path}, which all trials have in common: one may continue with what another has "
        f"saved. Write {FOLDER} where it is told that path: each trial has a folder of its own"
    )


def _link_folders(user: Path, files: Path, out: Path) -> None:
    """Make a folder that stands for the user's, and those above it; `out`, the tool's, is left out."""
    own = files
    for name, parent in zip(user.parts[1:], reversed(user.parents), strict=True):
        own.mkdir()
        for entry in _entries(parent):
            if entry.name != name:
                (own / entry.name).symlink_to(entry.path)
        own /= name
    _link_files(user, own, str(out), MAX_FILES)


def _link_files(source: Path, target: Path, out: str, limit: int) -> None:
    """Make a folder with links to files, and below it such folders of `limit` files at most, or else links."""
    target.mkdir()
    # Hidden ones last, such as .git: their files shall not make a link of another folder.
    for entry in sorted(_entries(source), key=lambda entry: entry.name.startswith(".")):
        if entry.path == out:
            continue
        is_folder = entry.is_dir(follow_symlinks=False)
        count = _count(entry.path, out, limit) if is_folder else 0
        if is_folder and count <= limit:
            _link_files(Path(entry.path), target / entry.name, out, limit)
            limit -= count
        else:
            (target / entry.name).symlink_to(entry.path)


def _count(folder: str, out: str, limit: int) -> int:
    """Return how many files are in a folder and below it; any number above `limit` if they are more."""
    count = 0
    for path, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if os.path.join(path, name) != out]
        count += len(folders) + len(names)
        if count > limit:
            break
    return count


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """Return what is in a folder; nothing if it may only be passed through."""
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except PermissionError:
        return []
