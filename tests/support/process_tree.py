"""Find and end processes by a mark in their environment.

A launcher's children leave its process group and its session (horovodrun's middlemen call setsid,
srun's tasks are children of slurmstepd, not of srun), so neither a process group nor the tree of
children finds them all. A variable in the environment does: every launcher hands it to its ranks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable

import psutil

MARK = "HVD_TRAINER_TEST_ID"
"""The variable with the mark, ``session/launch``: ``session`` alone names all that it started."""


def is_alive(process: psutil.Process) -> bool:
    """Return whether the process has not ended; a zombie has, and only waits for its parent to notice."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def marked(prefix: str) -> list[psutil.Process]:
    """Return all living processes of this machine but this one whose mark begins with ``prefix``."""
    found = []
    for process in psutil.process_iter():
        try:
            mark = process.environ().get(MARK, "")
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
        if mark.startswith(prefix) and process.pid != os.getpid() and is_alive(process):
            found.append(process)
    return found


def with_descendants(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Return the processes and everything they started, without repeats and without what has ended."""
    found: dict[int, psutil.Process] = {}
    for process in processes:
        try:
            family = [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            continue
        found.update({member.pid: member for member in family if is_alive(member)})
    return list(found.values())


def wait_for_end(processes: Iterable[psutil.Process], *, limit_s: float) -> list[psutil.Process]:
    """Wait until all have ended, at most ``limit_s`` seconds; return those that have not.

    Unlike psutil's own waiting it leaves the exit code of a child of ours for ``Popen`` to read.
    """
    deadline = time.monotonic() + limit_s
    while left := [process for process in processes if is_alive(process)]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    return left


def kill(processes: Iterable[psutil.Process]) -> None:
    """Send SIGKILL to all of them; one that ended meanwhile is no error."""
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


def kill_all_marked(prefix: str, *, limit_s: float = 10.0) -> None:
    """Kill until no marked process is left: one may start another while it is being killed.

    Raises:
        RuntimeError: something still lives after ``limit_s`` seconds.
    """
    deadline = time.monotonic() + limit_s
    while left := with_descendants(marked(prefix)):
        if time.monotonic() > deadline:
            raise RuntimeError(f"could not kill these processes in {limit_s:g} s:\n{describe(left)}")
        kill(left)
        wait_for_end(left, limit_s=0.2)


def describe(processes: Iterable[psutil.Process]) -> str:
    """Return one line per process: pid, parent, state, command."""
    lines = []
    for process in processes:
        try:
            with process.oneshot():
                command = " ".join(process.cmdline()) or process.name()
                lines.append(f"  pid {process.pid} (parent {process.ppid()}, {process.status()}): {command}")
        except psutil.NoSuchProcess:
            continue
    return "\n".join(lines) or "  (none)"
