"""Check this machine: CPUs, threads, shared memory, open files, InfiniBand."""

from __future__ import annotations

import math
import os
import resource
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hvd_trainer.tools.doctor.context import Context
from hvd_trainer.tools.doctor.finding import Finding, error, ok, size, warning
from hvd_trainer.utils.process import cpu_ids
from hvd_trainer.utils.text import plural

SHARED_MEMORY = Path("/dev/shm")
MIN_SHARED_BYTES = 2**30
"""A few loader processes with batches of images fill half of it."""
MIN_OPEN_FILES, FILES_PER_RANK = 1024, 4
"""Open files of a process: the soft limit of every distribution; and the connections to each further rank."""
THREADS = "OMP_NUM_THREADS"


def check_cpus(context: Context) -> list[Finding]:
    """Check the CPUs that this process may use, and the number of threads of a rank."""
    usable = cpu_ids()
    quota = cpu_quota(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))
    cores = num_cores(usable, Path("/sys/devices/system/cpu"))
    found = plural(cores, "core")
    if len(usable) > cores:
        found += f" with {len(usable)} hardware threads"
    there = os.cpu_count() or len(usable)
    if there > len(usable):
        found += f" usable, of the {there} CPUs here"
    limit = len(usable) if quota is None else max(1, min(len(usable), math.ceil(quota)))
    threads = context.environ.get(THREADS)
    if limit < len(usable):
        found += f", in a container that may use the time of {quota:g}"
        if threads is None:
            found += ": ranks would start a thread for each core"
            remedy = f"export {THREADS}=1    (or {limit} divided by the ranks that you start here)"
            return [warning("CPU", found, remedy), judge_threads(threads, limit)]
    return [ok("CPU", found), judge_threads(threads, limit)]


def judge_threads(setting: str | None, limit: int) -> Finding:
    """Return the finding for OMP_NUM_THREADS (None: unset) on `limit` usable CPUs."""
    if setting is None:
        return ok("threads", f"{THREADS} is not set: each rank takes its share of the cores")
    first = setting.partition(",")[0].strip()
    if not first.isdecimal() or int(first) < 1:
        return warning("threads", f"{THREADS}={setting} is not a number of threads", f"unset {THREADS}")
    if int(first) > limit:
        found = (
            f"{THREADS}={setting} is more than the {plural(limit, 'usable CPU')}: threads get in each other's way"
        )
        return warning("threads", found, f"unset {THREADS}    (each rank then takes its share of the cores)")
    return ok("threads", f"{THREADS}={setting}: so many in each rank, of {plural(limit, 'usable CPU')}")


def cpu_quota(own: Path, root: Path) -> float | None:
    """Return the CPU time that the control groups allow this process, in CPUs; None if they set no limit.

    Args:
        own: /proc/self/cgroup.
        root: /sys/fs/cgroup.
    """
    quotas = []
    try:
        lines = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:
        return None
    for number, controllers, path in lines:
        if number == "0":
            folders = _with_parents(root, path)
        elif "cpu" in controllers.split(","):
            folders = [*_with_parents(root / controllers, path), *_with_parents(root / "cpu", path)]
        else:
            continue
        quotas += [quota for folder in folders if (quota := _quota_in(folder)) is not None]
    return min(quotas, default=None)


def _with_parents(root: Path, path: str) -> list[Path]:
    """Return a control group's folder and those above it, each of which may set a limit.

    A container may not have the inner folders under the names that they have outside.
    """
    parts = Path(path.lstrip("/")).parts
    return [root.joinpath(*parts[:length]) for length in range(len(parts), -1, -1)]


def _quota_in(folder: Path) -> float | None:
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
    except (OSError, ValueError):
        return None
    return None if quota in ("max", "-1") else int(quota) / int(period)


def num_cores(cpus: Sequence[int], root: Path) -> int:
    """Count the cores of these CPUs: two hardware threads of one core count once.

    Args:
        root: /sys/devices/system/cpu.
    """
    cores = set()
    for cpu in cpus:
        try:
            cores.add((root / f"cpu{cpu}/topology/thread_siblings_list").read_text().strip())
        except OSError:
            return len(cpus)
    return len(cores)


def check_shared_memory(context: Context) -> list[Finding]:
    """Check /dev/shm, through which loader processes and NCCL hand over data."""
    folder, name = SHARED_MEMORY, str(SHARED_MEMORY)
    docker = "docker run --shm-size 8g"
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


def check_open_files(context: Context) -> list[Finding]:
    """Check how many files and connections a process may have."""
    ranks = sum(host.slots or 1 for host in context.hosts)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return [judge_open_files(soft, hard, max(MIN_OPEN_FILES, MIN_OPEN_FILES // 2 + FILES_PER_RANK * ranks))]


def judge_open_files(soft: int, hard: int, needed: int) -> Finding:
    """Return the finding for the soft and the hard limit of open files; -1 is no limit."""
    name, endless = "open files", resource.RLIM_INFINITY
    if soft == endless or soft >= needed:
        return ok(name, "as many as wanted" if soft == endless else f"{soft:,} for each process")
    found = f"{soft:,} for each process, and ranks and their loader processes may want {needed:,}"
    if hard == endless or hard >= needed:
        return warning(name, found, f"ulimit -n {needed if hard == endless else min(hard, 65536)}")
    found += f"; more than {hard:,} is for root to allow"
    return warning(
        name, found, "raise nofile in /etc/security/limits.conf    (Docker: --ulimit nofile=65536:65536)"
    )


def check_infiniband(context: Context) -> list[Finding]:
    """Check InfiniBand's ports and the memory that may be locked for them, if there are any."""
    return judge_infiniband(Path("/sys/class/infiniband"), resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])


def judge_infiniband(root: Path, locked: int) -> list[Finding]:
    """Return the findings for the ports below `root` in /sys, and for the limit of locked memory in bytes (-1:
    none).
    """
    ports = {f"{port.parent.parent.name} port {port.name}": port for port in sorted(root.glob("*/ports/*"))}
    if not ports:
        return []
    states = {name: _line(port / "state").partition(": ")[2] or "?" for name, port in ports.items()}
    found = ", ".join(f"{name} {state} {_line(ports[name] / 'rate')}".strip() for name, state in states.items())
    if "ACTIVE" in states.values():
        findings = [ok("InfiniBand", found)]
    else:
        findings = [warning("InfiniBand", f"{found}: none is active, so NCCL goes by the network cards", "ibstat")]
    if locked != resource.RLIM_INFINITY:
        remedy = "ulimit -l unlimited    (root: memlock in /etc/security/limits.conf; Docker: --ulimit memlock=-1)"
        text = f"{size(locked)}: NCCL and MPI lock more than that for InfiniBand"
        return [*findings, warning("locked memory", text, remedy)]
    return [*findings, ok("locked memory", "as much as wanted")]


def _line(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
