"""Checks of this machine: CPUs, threads, shared memory, open files, InfiniBand."""

from __future__ import annotations

import math
import os
import resource
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hvd_trainer.tools.doctor.context import Context
from hvd_trainer.tools.doctor.finding import Finding, count, error, ok, size, warning
from hvd_trainer.utils.process import cpu_ids

SHARED = Path("/dev/shm")
LEAST_SHARED = 2**30
"""Bytes: a few loader processes with batches of images fill half of that."""
LEAST_FILES, FILES_PER_RANK = 1024, 4
"""Open files of a process: what every distribution gives; and each further rank is connected by a few."""
THREADS = "OMP_NUM_THREADS"


def check_cpus(situation: Context) -> list[Finding]:
    """The CPUs that this process may use, and the threads of a rank."""
    usable = cpu_ids()
    quota = cpu_quota(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))
    cores = num_cores(usable, Path("/sys/devices/system/cpu"))
    found = count(cores, "core")
    if len(usable) > cores:
        found += f" with {len(usable)} hardware threads"
    there = os.cpu_count() or len(usable)
    if there > len(usable):
        found += f" usable, of the {there} CPUs here"
    limit = len(usable) if quota is None else max(1, min(len(usable), math.ceil(quota)))
    threads = situation.environ.get(THREADS)
    if limit < len(usable):
        found += f", in a container that may use the time of {quota:g}"
        if threads is None:
            found += ": ranks would start a thread for each core"
            remedy = f"export {THREADS}=1    (or {limit} divided by the ranks that you start here)"
            return [warning("CPU", found, remedy), judge_threads(threads, limit)]
    return [ok("CPU", found), judge_threads(threads, limit)]


def judge_threads(setting: str | None, limit: int) -> Finding:
    """Of OMP_NUM_THREADS, where so many CPUs are usable."""
    if setting is None:
        return ok("threads", f"{THREADS} is not set: each rank takes its share of the cores")
    first = setting.partition(",")[0].strip()
    if not first.isdecimal() or int(first) < 1:
        return warning("threads", f"{THREADS}={setting} is not a number of threads", f"unset {THREADS}")
    if int(first) > limit:
        found = (
            f"{THREADS}={setting} is more than the {count(limit, 'usable CPU')}: threads get in each other's way"
        )
        return warning("threads", found, f"unset {THREADS}    (each rank then takes its share of the cores)")
    return ok("threads", f"{THREADS}={setting}: so many in each rank, of {count(limit, 'usable CPU')}")


def cpu_quota(own: Path, root: Path) -> float | None:
    """The CPU time that the control groups allow this process, in CPUs; None: as much as there is.

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
            folders = _up(root, path)
        elif "cpu" in controllers.split(","):
            folders = [*_up(root / controllers, path), *_up(root / "cpu", path)]
        else:
            continue
        quotas += [quota for folder in folders if (quota := _quota_in(folder)) is not None]
    return min(quotas, default=None)


def _up(root: Path, path: str) -> list[Path]:
    """A control group's folder and those above it, each of which may set a limit.

    In a container the inner ones may not be there under the names that they have outside.
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
    """How many cores these CPUs are: two hardware threads of one core count once.

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


def check_shared_memory(situation: Context) -> list[Finding]:
    """/dev/shm, through which loader processes and NCCL hand over data."""
    return [judge_shared_memory(SHARED)]


def judge_shared_memory(folder: Path) -> Finding:
    """Whether there is room in it, and it can be written to."""
    name = str(folder)
    docker = "docker run --shm-size 8g"
    try:
        with tempfile.TemporaryFile(dir=folder):
            room = shutil.disk_usage(folder)
    except OSError as wrong:
        found = f"cannot be written to ({wrong.strerror}): loader processes and NCCL share memory there"
        return error(name, found, f"{docker}    (outside of containers: mount -t tmpfs -o size=8g tmpfs {folder})")
    free = f"{size(room.free)} free of {size(room.total)}"
    if room.total < LEAST_SHARED:
        found = f"{free}: loader processes and NCCL share memory there, and die of a bus error where it is full"
        return warning(name, found, f"{docker}    (outside of containers: mount -o remount,size=8g {folder})")
    if room.free < LEAST_SHARED:
        found = f"{free}: something fills it, such as what is left of killed jobs"
        return warning(name, found, f"ls -l {folder}    (and remove what no running job uses)")
    return ok(name, free)


def check_open_files(situation: Context) -> list[Finding]:
    """How many files and connections a process may have."""
    ranks = sum(host.slots or 1 for host in situation.hosts)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return [judge_open_files(soft, hard, max(LEAST_FILES, LEAST_FILES // 2 + FILES_PER_RANK * ranks))]


def judge_open_files(soft: int, hard: int, needed: int) -> Finding:
    """Of the limit in force, and of the one up to which anybody may raise it; -1: none."""
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


def check_infiniband(situation: Context) -> list[Finding]:
    """InfiniBand's ports, and the memory that may be locked for them; nothing where there is none."""
    return judge_infiniband(Path("/sys/class/infiniband"), resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])


def judge_infiniband(root: Path, locked: int) -> list[Finding]:
    """Of the ports in /sys, and of the limit in bytes (-1: none)."""
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
