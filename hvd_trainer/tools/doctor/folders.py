"""Check the folders for data and logs: that they exist or can be made, are writable, and have room."""

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

MOUNTS_FILE = Path("/proc/self/mounts")
NETWORK_FILE_SYSTEMS = (
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
"""Prefixes of the names of file systems that other hosts can mount, too."""
MIN_DATA_BYTES, MIN_LOG_BYTES = 5 * 2**30, 2**30
DATA_PATTERNS = ("*-ubyte*", "*/*-ubyte*", "MNIST/raw/*-ubyte*", "aclImdb*")
"""Where the jobs look for the files of MNIST and IMDB."""


@dataclass(frozen=True)
class FolderState:
    """A folder, and whether it can be written to."""

    exists: bool
    error: str
    """why nothing can be written there; empty if it can"""
    free_bytes: int
    kind: str
    """`local disk (ext4)`"""


def check_data(context: Context) -> list[Finding]:
    """Check the folder for data sets."""
    asked = context.options.data_dir
    folder = (asked or default_data_dir()).expanduser().absolute()
    has_data = any(True for pattern in DATA_PATTERNS for _ in folder.glob(pattern)) if folder.is_dir() else False
    return [judge_data(folder, probe_folder(folder), has_data)]


def check_logs(context: Context) -> list[Finding]:
    """Check the folder for logs and checkpoints, if one was named."""
    asked = context.options.log_dir
    if asked is None:
        return []
    folder = asked.expanduser().absolute()
    return [judge_logs(folder, probe_folder(folder))]


def probe_folder(folder: Path) -> FolderState:
    """Write and remove a file in the folder, or in the nearest folder above it that exists, and return the
    outcome.
    """
    exists = folder.is_dir()
    if folder.exists() and not exists:
        return FolderState(False, "it is a file", 0, "")
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
    return FolderState(exists, wrong, free, file_system(nearest.resolve(), MOUNTS_FILE.read_text()))


def file_system(folder: Path, mounts: str) -> str:
    """Return the kind of file system, `network (nfs4)`, `memory (tmpfs)` or `local disk (ext4)`, by the lines
    of /proc/self/mounts.
    """
    found = "", ""
    for line in mounts.splitlines():
        _, place, kind, *_ = line.split()
        # The kernel writes a space as \040.
        place = place.encode().decode("unicode_escape")
        # A later mount at the same place hides the earlier one.
        if folder.is_relative_to(place) and len(place) >= len(found[0]):
            found = place, kind
    kind = found[1]
    if kind.startswith(NETWORK_FILE_SYSTEMS):
        return f"network ({kind})"
    return f"memory ({kind})" if kind in ("tmpfs", "ramfs") else f"local disk ({kind})"


def judge_data(folder: Path, state: FolderState, has_data: bool) -> Finding:
    """Return the finding for the data folder; one that has the data sets need not be writable."""
    name = "data folder"
    if has_data:
        return ok(name, f"{folder}: data are there, on {state.kind}")
    if state.error:
        return error(
            name,
            f"{folder}: nothing can be written ({state.error})",
            "--data-dir FOLDER, one that you may write to",
        )
    text = _describe_folder(folder, state)
    if state.free_bytes < MIN_DATA_BYTES:
        return warning(
            name, f"{text}: little for data sets", "--data-dir FOLDER, on another disk", **_free_figure(state)
        )
    return ok(name, text, **_free_figure(state))


def judge_logs(folder: Path, state: FolderState) -> Finding:
    """Return the finding for the log folder, which needs room for several checkpoints: each holds the model and
    its optimizer's state.
    """
    name = "log folder"
    if state.error:
        return error(
            name,
            f"{folder}: nothing can be written ({state.error})",
            "--log-dir FOLDER, one that you may write to",
        )
    text = _describe_folder(folder, state)
    if state.free_bytes < MIN_LOG_BYTES:
        return warning(
            name, f"{text}: little for checkpoints", "--log-dir FOLDER, on another disk", **_free_figure(state)
        )
    if state.kind.startswith("memory"):
        return warning(
            name,
            f"{text}: gone after a restart of the machine",
            "--log-dir FOLDER, on a disk",
            **_free_figure(state),
        )
    return ok(name, text, **_free_figure(state))


def _describe_folder(folder: Path, state: FolderState) -> str:
    return f"{folder}{'' if state.exists else ' (can be made)'}: {size(state.free_bytes)} free on {state.kind}"


def _free_figure(state: FolderState) -> Mapping[str, float]:
    return {"free_mb": state.free_bytes // 2**20}
