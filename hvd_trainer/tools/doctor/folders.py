"""Checks of the folders for data and logs: there, or can be made; writable; with room."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hvd_trainer.tools.doctor.context import Context
from hvd_trainer.tools.doctor.finding import Finding, error, ok, size, warning
from hvd_trainer.utils.paths import default_data_dir

MOUNTS = Path("/proc/self/mounts")
NETWORK = (
    "nfs",
    "cifs",
    "smb",
    "lustre",
    "beegfs",
    "gpfs",
    "ceph",
    "glusterfs",
    "9p",
    "afs",
    "wekafs",
    "fuse.sshfs",
)
"""Beginnings of the names of file systems that other hosts may see, too."""
ROOM_FOR_DATA, ROOM_FOR_LOGS = 5 * 2**30, 2**30
IN_DATA = ("*-ubyte*", "*/*-ubyte*", "MNIST/raw/*-ubyte*", "aclImdb*")
"""MNIST's files and IMDB's, where the jobs look for them."""


@dataclass(frozen=True)
class Place:
    """A folder, and what can be done with it."""

    exists: bool
    wrong: str
    """why nothing can be written there; empty if it can"""
    free: int
    """bytes"""
    kind: str
    """`local disk (ext4)`"""


def check_data(situation: Context) -> list[Finding]:
    """The folder for data sets."""
    asked = situation.options.data_dir
    folder = (asked or default_data_dir()).expanduser().absolute()
    has_data = any(True for pattern in IN_DATA for _ in folder.glob(pattern)) if folder.is_dir() else False
    return [judge_data(folder, look_at(folder), has_data)]


def check_logs(situation: Context) -> list[Finding]:
    """The folder for logs and checkpoints, if one was named."""
    asked = situation.options.log_dir
    if asked is None:
        return []
    folder = asked.expanduser().absolute()
    return [judge_logs(folder, look_at(folder))]


def look_at(folder: Path) -> Place:
    """Writes a file there, or where the folder would be made, and removes it."""
    exists = folder.is_dir()
    if folder.exists() and not exists:
        return Place(False, "it is a file", 0, "")
    nearest = next(place for place in (folder, *folder.parents) if place.exists())
    wrong = ""
    try:
        with tempfile.NamedTemporaryFile(dir=nearest, prefix=".hvd_trainer-doctor-") as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
        free = shutil.disk_usage(nearest).free
    except OSError as error:
        wrong, free = error.strerror or str(error), 0
        if nearest != folder:
            wrong += f" in {nearest}"
    return Place(exists, wrong, free, file_system(nearest.resolve(), MOUNTS.read_text()))


def file_system(folder: Path, mounts: str) -> str:
    """`network (nfs4)`, `memory (tmpfs)` or `local disk (ext4)`, from the lines of /proc/self/mounts."""
    found = "", ""
    for line in mounts.splitlines():
        _, place, kind, *_ = line.split()
        # Spaces in it are written as \040.
        place = place.encode().decode("unicode_escape")
        # Of two at one place the later one hides the other.
        if folder.is_relative_to(place) and len(place) >= len(found[0]):
            found = place, kind
    kind = found[1]
    if kind.startswith(NETWORK):
        return f"network ({kind})"
    return f"memory ({kind})" if kind in ("tmpfs", "ramfs") else f"local disk ({kind})"


def judge_data(folder: Path, place: Place, has_data: bool) -> Finding:
    """Data that are there need only be read."""
    name = "data folder"
    if has_data:
        return ok(name, f"{folder}: data are there, on {place.kind}")
    if place.wrong:
        return error(
            name,
            f"{folder}: nothing can be written ({place.wrong})",
            "--data-dir FOLDER, one that you may write to",
        )
    text = _described(folder, place)
    if place.free < ROOM_FOR_DATA:
        return warning(name, f"{text}: little for data sets", "--data-dir FOLDER, on another disk", **_room(place))
    return ok(name, text, **_room(place))


def judge_logs(folder: Path, place: Place) -> Finding:
    """Checkpoints are as large as the model and its optimizer's state, several times."""
    name = "log folder"
    if place.wrong:
        return error(
            name,
            f"{folder}: nothing can be written ({place.wrong})",
            "--log-dir FOLDER, one that you may write to",
        )
    text = _described(folder, place)
    if place.free < ROOM_FOR_LOGS:
        return warning(
            name, f"{text}: little for checkpoints", "--log-dir FOLDER, on another disk", **_room(place)
        )
    if place.kind.startswith("memory"):
        return warning(
            name, f"{text}: gone after a restart of the machine", "--log-dir FOLDER, on a disk", **_room(place)
        )
    return ok(name, text, **_room(place))


def _described(folder: Path, place: Place) -> str:
    return f"{folder}{'' if place.exists else ' (can be made)'}: {size(place.free)} free on {place.kind}"


def _room(place: Place) -> Mapping[str, float]:
    return {"free_mb": place.free // 2**20}
