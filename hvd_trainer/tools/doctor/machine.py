"""Check this machine: CPUs, threads, shared memory, and the folders for data and logs."""

from __future__ import annotations

import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil

from hvd_trainer.measure.machine import cpu_control_groups, read_text
from hvd_trainer.tools.doctor.context import Context
from hvd_trainer.tools.doctor.findings import Finding, error, ok, size, warning
from hvd_trainer.utils.files import default_data_dir
from hvd_trainer.utils.process import cpu_ids
from hvd_trainer.utils.text import plural

SHARED_MEMORY = Path("/dev/shm")
MIN_SHARED_BYTES = 2**30
"""A few loader processes with batches of images fill half of it."""
THREADS = "OMP_NUM_THREADS"
MIN_DATA_BYTES, MIN_LOG_BYTES = 5 * 2**30, 2**30
DATA_PATTERNS = ("*-ubyte*", "*/*-ubyte*", "MNIST/raw/*-ubyte*", "aclImdb*")
"""Where the jobs look for the files of MNIST and IMDB."""


def check_cpus(context: Context) -> Iterator[Finding]:
    """Check the CPUs that this process may use, and the number of threads of a rank."""
    usable, installed = len(cpu_ids()), os.cpu_count() or 0
    cores = psutil.cpu_count(logical=False) or installed
    quota, setting = cpu_quota(), context.environ.get(THREADS)
    found = f"{plural(usable, 'CPU')} usable, of {installed:,} here, on {plural(cores, 'core')}"
    limit = usable if quota is None else max(1, min(usable, math.ceil(quota)))
    if limit < usable:
        found += f", in a container that may use the time of {quota:g}"
    if limit < usable and setting is None:
        remedy = f"export {THREADS}=1    (or {limit} divided by the ranks that you start here)"
        yield warning("CPU", f"{found}: ranks would start a thread for each core", remedy)
    else:
        yield ok("CPU", found)
    if setting is None:
        yield ok("threads", f"{THREADS} is not set: each rank takes its share of the cores")
        return
    threads, said = setting.partition(",")[0].strip(), f"{THREADS}={setting}"
    if threads.isdecimal() and 1 <= int(threads) <= limit:
        yield ok("threads", f"{said} in each rank, of {plural(limit, 'usable CPU')}")
    else:
        problem = (
            f"is more than the {limit} usable CPUs"
            if threads.strip("0").isdecimal()
            else "is no number of threads"
        )
        yield warning(
            "threads", f"{said} {problem}", f"unset {THREADS}    (each rank then takes its share of the cores)"
        )


def cpu_quota() -> float | None:
    """Return the CPU time that the control groups allow this process, in CPUs; None if they set no limit."""
    quotas = []
    for folder in cpu_control_groups():
        old = " ".join(read_text(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
        if match := re.fullmatch(r"(\d+) (\d+)", read_text(folder / "cpu.max") or old):
            quotas.append(int(match[1]) / int(match[2]))
    return min(quotas, default=None)


def check_shared_memory(context: Context) -> list[Finding]:
    """Check /dev/shm, through which loader processes and NCCL hand over data."""
    folder, name, docker = SHARED_MEMORY, str(SHARED_MEMORY), "docker run --shm-size 8g"
    try:
        with tempfile.TemporaryFile(dir=folder):
            room = shutil.disk_usage(folder)
    except OSError as wrong:
        found = f"cannot be written to ({wrong.strerror}): loader processes and NCCL share memory there"
        remedy = f"{docker}    (outside of containers: mount -t tmpfs -o size=8g tmpfs {folder})"
        return [error(name, found, remedy)]
    free = f"{size(room.free)} free of {size(room.total)}"
    if room.total < MIN_SHARED_BYTES:
        found = f"{free}: loader processes and NCCL share memory there, and die of a bus error where it is full"
        return [warning(name, found, f"{docker}    (outside of containers: mount -o remount,size=8g {folder})")]
    if room.free < MIN_SHARED_BYTES:
        found = f"{free}: something fills it, such as what is left of killed jobs"
        return [warning(name, found, f"ls -l {folder}    (and remove what no running job uses)")]
    return [ok(name, free)]


def check_data_folder(context: Context) -> list[Finding]:
    """Check the folder for data sets; one that has them need not be writable."""
    folder = (context.options.data_dir or default_data_dir()).expanduser().absolute()
    if folder.is_dir() and any(True for pattern in DATA_PATTERNS for _ in folder.glob(pattern)):
        return [ok("data folder", f"{folder}: data are there, on {file_system(folder)}")]
    return [_judge_folder("data folder", folder, MIN_DATA_BYTES, "data sets")]


def check_log_folder(context: Context) -> Iterator[Finding]:
    """Check the folder for logs and checkpoints, if one was named.

    It must outlast the machine's restart, and have room for several checkpoints, each with the optimizer's state.
    """
    if context.options.log_dir is not None:
        folder = context.options.log_dir.expanduser().absolute()
        yield _judge_folder("log folder", folder, MIN_LOG_BYTES, "checkpoints", must_last=True)


def _judge_folder(name: str, folder: Path, min_bytes: int, content: str, *, must_last: bool = False) -> Finding:
    option = f"--{name.replace(' folder', '-dir')} FOLDER"
    nearest = next(place for place in (folder, *folder.parents) if place.exists())
    try:
        with tempfile.NamedTemporaryFile(dir=nearest, prefix=".hvd_trainer-doctor-") as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
    except OSError as wrong:
        where = "" if nearest == folder else f" in {nearest}"
        found = f"{folder}: nothing can be written ({wrong.strerror}{where})"
        return error(name, found, f"{option}, one that you may write to")
    free, kind = shutil.disk_usage(nearest).free, file_system(nearest)
    text = f"{folder}{'' if nearest == folder else ' (can be made)'}: {size(free)} free on {kind}"
    figures = {"free_mb": free // 2**20}
    if free < min_bytes:
        return warning(name, f"{text}: little for {content}", f"{option}, on another disk", **figures)
    if must_last and kind in ("tmpfs", "ramfs"):
        return warning(name, f"{text}: gone after a restart of the machine", f"{option}, on a disk", **figures)
    return ok(name, text, **figures)


def file_system(folder: Path) -> str:
    """Return the kind of file system of a folder, such as `ext4`, `nfs4` or `tmpfs`."""
    # The longest path counts; a later mount at the same place hides the earlier one.
    mounts = sorted(psutil.disk_partitions(all=True), key=lambda mount: len(mount.mountpoint))
    around = [mount for mount in mounts if folder.resolve().is_relative_to(mount.mountpoint)]
    return around[-1].fstype if around else "a disk of unknown kind"
