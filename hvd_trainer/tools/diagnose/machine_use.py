"""Tell what else was at work on this machine during a run: other programs, the hypervisor, limits, the swap."""

from __future__ import annotations

import resource
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from hvd_trainer.tools.runner.machine import cpu_control_groups, read_text

MIN_CORES = 0.1
"""Cores that a program must have used to be named."""
VMSTAT, PAGES = Path("/proc/vmstat"), ("pswpin", "pswpout")
THROTTLED = {"throttled_usec": 1e-6, "throttled_time": 1e-9}
"""Names in cpu.stat, and their units in seconds."""


@dataclass(frozen=True, kw_only=True)
class MachineUse:
    """The use of this machine by other programs during a run."""

    other_cores: float = 0.0
    """cores that other programs kept busy, in the mean"""
    programs: Mapping[str, float] = field(default_factory=dict)
    """the cores of each that was there the whole time, by its name"""
    stolen: float = 0.0
    """cores that the hypervisor gave to other machines"""
    throttled: float = 0.0
    """fraction of the time in which a limit (cgroup) stopped the run"""
    swapped_pages: int = 0

    @property
    def named(self) -> str:
        """The programs by name; empty if none is known."""
        ranked = sorted(self.programs.items(), key=lambda item: -item[1])
        return ", ".join(f"{name} {cores:.1f}" for name, cores in ranked[:3])


class MachineWatch:
    """Compares the machine before and after a run."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._programs = _cpu_of_programs()
        self._cpu, self._own = psutil.cpu_times(), _own_cpu_s()
        self._throttled, self._pages = _throttled_s(), _swapped_pages()

    def end(self, *, has_ended: bool = True) -> MachineUse:
        """Return what was at work since the beginning.

        Args:
            has_ended: whether the run came to its end. If it was killed, nobody has waited for all its processes,
                and their CPU time is unknown: then only programs count that were there the whole time.
        """
        seconds = max(time.monotonic() - self._began, 1e-3)
        cpu = psutil.cpu_times()
        busy = sum(_busy(cpu)) - sum(_busy(self._cpu)) - (_own_cpu_s() - self._own)
        cores = {
            f"{name} (process {key[0]})": (used - self._programs[key][1]) / seconds
            for key, (name, used) in _cpu_of_programs().items()
            if key in self._programs
        }
        named = sum(cores.values())
        return MachineUse(
            other_cores=max(busy / seconds, named) if has_ended else named,
            programs={name: its for name, its in cores.items() if its >= MIN_CORES},
            stolen=(getattr(cpu, "steal", 0.0) - getattr(self._cpu, "steal", 0.0)) / seconds,
            throttled=(_throttled_s() - self._throttled) / seconds,
            swapped_pages=_swapped_pages() - self._pages,
        )


def _busy(cpu: object) -> list[float]:
    return [getattr(cpu, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq")]


def _own_cpu_s() -> float:
    """Return the CPU time of this process and of its children that have ended: those of the run."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _cpu_of_programs() -> dict[tuple[int, float], tuple[str, float]]:
    """Return name and CPU time of each process but this one."""
    found = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            used = process.cpu_times()
            found[process.pid, process.create_time()] = (_name(process), used.user + used.system)
    return {key: value for key, value in found.items() if key[0] != psutil.Process().pid}


def _name(process: psutil.Process) -> str:
    """Return a process's name; of an interpreter also its script."""
    name = process.name()
    with suppress(psutil.Error):
        words = [word for word in process.cmdline()[1:] if not word.startswith("-")]
        if words and name.startswith(("python", "bash", "sh", "perl")):
            return f"{name} {Path(words[0].split()[0] if words[0].split() else '').name}".strip()
    return name


def _throttled_s() -> float:
    """Return the seconds for which a limit has stopped this process's control group, by cgroup 2 or cgroup 1."""
    for folder in reversed(cpu_control_groups()):
        stat = dict(line.split() for line in read_text(folder / "cpu.stat").splitlines())
        for name, unit_s in THROTTLED.items():
            if name in stat:
                return int(stat[name]) * unit_s
    return 0.0


def _swapped_pages() -> int:
    pairs = [line.split() for line in read_text(VMSTAT).splitlines()]
    return sum(int(value) for name, value in pairs if name in PAGES)
