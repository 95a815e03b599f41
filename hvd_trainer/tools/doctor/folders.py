"""Check the folders for data and logs: that they exist or can be made, are writable, and have room."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import psutil

from hvd_trainer.tools.doctor.context import Context
from hvd_trainer.tools.doctor.finding import Finding, error, ok, size, warning
from hvd_trainer.utils.paths import default_data_dir

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


def check_data(context: Context) -> list[Finding]:
    """Check the folder for data sets; one that has them need not be writable."""
    name, folder = "data folder", (context.options.data_dir or default_data_dir()).expanduser().absolute()
    if folder.is_dir() and any(True for pattern in DATA_PATTERNS for _ in folder.glob(pattern)):
        return [ok(name, f"{folder}: data are there, on {file_system(folder.resolve())}")]
    return [_judge_folder(name, folder, "--data-dir FOLDER", MIN_DATA_BYTES, "data sets")]


def check_logs(context: Context) -> list[Finding]:
    """Check the folder for logs and checkpoints, if one was named.

    It must outlast the machine's restart, and have room for several checkpoints, each with the optimizer's state.
    """
    if context.options.log_dir is None:
        return []
    folder = context.options.log_dir.expanduser().absolute()
    return [_judge_folder("log folder", folder, "--log-dir FOLDER", MIN_LOG_BYTES, "checkpoints", must_last=True)]


def _judge_folder(
    name: str, folder: Path, option: str, min_bytes: int, content: str, *, must_last: bool = False
) -> Finding:
    nearest = next(place for place in (folder, *folder.parents) if place.exists())
    wrong = _write_error(nearest)
    if wrong:
        where = "" if nearest == folder else f" in {nearest}"
        return error(
            name, f"{folder}: nothing can be written ({wrong}{where})", f"{option}, one that you may write to"
        )
    free, kind = shutil.disk_usage(nearest).free, file_system(nearest.resolve())
    text = f"{folder}{'' if nearest == folder else ' (can be made)'}: {size(free)} free on {kind}"
    free_mb = free // 2**20
    if free < min_bytes:
        return warning(name, f"{text}: little for {content}", f"{option}, on another disk", free_mb=free_mb)
    if must_last and kind.startswith("memory"):
        return warning(
            name, f"{text}: gone after a restart of the machine", f"{option}, on a disk", free_mb=free_mb
        )
    return ok(name, text, free_mb=free_mb)


def _write_error(folder: Path) -> str:
    """Write and remove a file in the folder; return why that fails, or an empty text."""
    if not folder.is_dir():
        return "it is a file"
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".hvd_trainer-doctor-") as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error.strerror or str(error)
    return ""


def file_system(folder: Path) -> str:
    """Return the kind of file system of a folder: `network (nfs4)`, `memory (tmpfs)` or `local disk (ext4)`."""
    kind = ""
    # By the length of the path; a later mount at the same place hides the earlier one.
    for mount in sorted(psutil.disk_partitions(all=True), key=lambda mount: len(mount.mountpoint)):
        if folder.is_relative_to(mount.mountpoint):
            kind = mount.fstype
    if kind.startswith(NETWORK_FILE_SYSTEMS):
        return f"network ({kind})"
    return f"memory ({kind})" if kind in ("tmpfs", "ramfs") else f"local disk ({kind})"
