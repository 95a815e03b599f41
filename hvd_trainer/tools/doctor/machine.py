"""Check this machine: CPUs, threads, shared memory, open files, and the folders for data and logs."""

from __future__ import annotations

import math
import os
import re
import resource
import shutil
import tempfile
from collections.abc import Iterator, Sequence
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
MIN_OPEN_FILES, FILES_PER_RANK = 1024, 4
"""Open files of a process: the soft limit of every distribution; and the connections to each further rank."""
ENDLESS = resource.RLIM_INFINITY
THREADS = "OMP_NUM_THREADS"
NETWORK_FILE_SYSTEMS = (
    *("nfs", "cifs", "smb", "lustre", "beegfs", "gpfs", "ceph", "glusterfs", "9p", "afs", "wekafs", "fuse.sshfs"),
)
"""Prefixes of the names of file systems that other hosts can mount, too."""
MIN_DATA_BYTES, MIN_LOG_BYTES = 5 * 2**30, 2**30
DATA_PATTERNS = ("MNIST/raw/*-ubyte*", "aclImdb*")
"""Where the jobs look for the files of MNIST and IMDB."""


def check_cpus(context: Context) -> Iterator[Finding]:
    """Check the CPUs that this process may use, and the number of threads of a rank."""
    usable = cpu_ids()
    quota = cpu_quota()
    cores, total = num_cores(usable, Path("/sys/devices/system/cpu")), os.cpu_count() or len(usable)
    text = plural(cores, "core")
    if len(usable) > cores:
        text += f" with {len(usable)} hardware threads"
    if total > len(usable):
        text += f" usable, of the {total} CPUs here"
    limit = len(usable) if quota is None else max(1, min(len(usable), math.ceil(quota)))
    setting = context.environ.get(THREADS)
    if limit < len(usable):
        text += f", in a container that may use the time of {quota:g}"
    if limit < len(usable) and setting is None:
        remedy = f"export {THREADS}=1    (or {limit} divided by the ranks that you start here)"
        yield warning("CPU", f"{text}: ranks would start a thread for each core", remedy)
    else:
        yield ok("CPU", text)
    threads, cpus = (setting or "").partition(",")[0].strip(), plural(limit, "usable CPU")
    if setting is None:
        yield ok("threads", f"{THREADS} is not set: each rank takes its share of the cores")
    elif not threads.isdecimal() or int(threads) < 1:
        yield warning("threads", f"{THREADS}={setting} is not a number of threads", f"unset {THREADS}")
    elif int(threads) > limit:
        text = f"{THREADS}={setting} is more than the {cpus}: threads wait for each other"
        yield warning("threads", text, f"unset {THREADS}    (each rank then takes its share of the cores)")
    else:
        yield ok("threads", f"{THREADS}={setting}: so many in each rank, of {cpus}")


def cpu_quota() -> float | None:
    """Return the CPU time that the control groups allow this process, in CPUs; None if they set no limit."""
    quotas = []
    for folder in cpu_control_groups():
        old = " ".join(read_text(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
        if match := re.fullmatch(r"(\d+) (\d+)", read_text(folder / "cpu.max") or old):
            quotas.append(int(match[1]) / int(match[2]))
    return min(quotas, default=None)


def num_cores(cpus: Sequence[int], root: Path) -> int:
    """Count the cores of these CPUs: two hardware threads of one core count once.

    Args:
        root: /sys/devices/system/cpu.
    """
    siblings = [read_text(root / f"cpu{cpu}/topology/thread_siblings_list") for cpu in cpus]
    return len(set(siblings)) if all(siblings) else len(cpus)


def check_shared_memory(context: Context) -> list[Finding]:
    """Check /dev/shm, through which loader processes and NCCL hand over data."""
    folder, name, docker = SHARED_MEMORY, str(SHARED_MEMORY), "docker run --shm-size 8g"
    try:
        with tempfile.TemporaryFile(dir=folder):
            room = shutil.disk_usage(folder)
    except OSError as wrong:
        text = f"cannot be written to ({wrong.strerror}): loader processes and NCCL share memory there"
        remedy = f"{docker}    (outside of containers: mount -t tmpfs -o size=8g tmpfs {folder})"
        return [error(name, text, remedy)]
    free = f"{size(room.free)} free of {size(room.total)}"
    if room.total < MIN_SHARED_BYTES:
        text = f"{free}: loader processes and NCCL share memory there, and die of a bus error where it is full"
        return [warning(name, text, f"{docker}    (outside of containers: mount -o remount,size=8g {folder})")]
    if room.free < MIN_SHARED_BYTES:
        text = f"{free}: something fills it, such as what is left of killed jobs"
        return [warning(name, text, f"ls -l {folder}    (and remove what no running job uses)")]
    return [ok(name, free)]


def check_open_files(context: Context) -> list[Finding]:
    """Check how many files and connections a process may have."""
    name, ranks = "open files", sum(host.slots or 1 for host in context.hosts)
    needed = max(MIN_OPEN_FILES, MIN_OPEN_FILES // 2 + FILES_PER_RANK * ranks)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == ENDLESS or soft >= needed:
        return [ok(name, "as many as wanted" if soft == ENDLESS else f"{soft:,} for each process")]
    text = f"{soft:,} for each process, and ranks and their loader processes may want {needed:,}"
    if hard == ENDLESS or hard >= needed:
        return [warning(name, text, f"ulimit -n {max(needed, min(hard, 65536))}")]
    remedy = "raise nofile in /etc/security/limits.conf    (Docker: --ulimit nofile=65536:65536)"
    return [warning(name, f"{text}; more than {hard:,} is for root to allow", remedy)]


def check_data_folder(context: Context) -> list[Finding]:
    """Check the folder for data sets; one that has them need not be writable."""
    folder = (context.options.data_dir or default_data_dir()).expanduser().absolute()
    # Path's own is_dir and exists raise an error below a folder that may not be looked into.
    if os.path.isdir(folder) and any(True for pattern in DATA_PATTERNS for _ in folder.glob(pattern)):
        return [ok("data folder", f"{folder}: data are there, on {file_system(folder.resolve())}")]
    return [_judge_folder("data folder", folder, MIN_DATA_BYTES, "data sets")]


def check_log_folder(context: Context) -> list[Finding]:
    """Check the folder for logs and checkpoints, if one was named.

    It must outlast the machine's restart, and have room for several checkpoints, each with the optimizer's state.
    """
    if context.options.log_dir is None:
        return []
    folder = context.options.log_dir.expanduser().absolute()
    return [_judge_folder("log folder", folder, MIN_LOG_BYTES, "checkpoints", must_last=True)]


def _judge_folder(name: str, folder: Path, min_bytes: int, content: str, *, must_last: bool = False) -> Finding:
    option = f"--{name.replace(' folder', '-dir')} FOLDER"
    nearest = next(place for place in (folder, *folder.parents) if os.path.exists(place))
    try:
        with tempfile.NamedTemporaryFile(dir=nearest, prefix=".hvd_trainer-doctor-") as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
    except OSError as wrong:
        where = "" if nearest == folder else f" in {nearest}"
        text = f"{folder}: nothing can be written ({wrong.strerror}{where})"
        return error(name, text, f"{option}, one that you may write to")
    free, kind = shutil.disk_usage(nearest).free, file_system(nearest.resolve())
    text = f"{folder}{'' if nearest == folder else ' (can be made)'}: {size(free)} free on {kind}"
    figures = {"free_mb": free // 2**20}
    if free < min_bytes:
        return warning(name, f"{text}: little for {content}", f"{option}, on another disk", **figures)
    if must_last and kind.startswith("memory"):
        return warning(name, f"{text}: gone after a restart of the machine", f"{option}, on a disk", **figures)
    return ok(name, text, **figures)


def file_system(folder: Path) -> str:
    """Return the kind of file system of a folder: `network (nfs4)`, `memory (tmpfs)` or `local disk (ext4)`."""
    # The longest path counts; a later mount at the same place hides the earlier one.
    mounts = sorted(psutil.disk_partitions(all=True), key=lambda mount: len(mount.mountpoint))
    kind = next((mount.fstype for mount in reversed(mounts) if folder.is_relative_to(mount.mountpoint)), "")
    where = "network" if kind.startswith(NETWORK_FILE_SYSTEMS) else "local disk"
    return f"{'memory' if kind in ('tmpfs', 'ramfs') else where} ({kind})"
