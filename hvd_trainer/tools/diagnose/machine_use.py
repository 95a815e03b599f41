"""Tell what else was at work on this machine during a run: other programs, the hypervisor, limits, the swap."""

from __future__ import annotations

import os
import time
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean

import psutil

from hvd_trainer.measure.machine import cpu_control_groups, cpu_seconds, read_text
from hvd_trainer.tools.diagnose.profile import RankProfile

MIN_CORES = 0.1
"""Cores that a program must have used to be named."""
PAGE = 4096
"""Bytes of a page, by which psutil multiplies what the kernel counts."""
THROTTLED = {"throttled_usec": 1e-6, "throttled_time": 1e-9}
"""Names in cpu.stat, and their units in seconds."""


@dataclass(frozen=True, kw_only=True)
class MachineUse:
    """The use of this machine by other programs during a run."""

    other_cores: float = 0.0
    """cores that other programs kept busy, in the mean"""
    programs: Mapping[str, float] = field(default_factory=dict)
    """the cores of each that was there at the end, by its name"""
    stolen: float = 0.0
    """cores, of those that this process may use, that the hypervisor gave to other machines"""
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
        self._counted = _throttled_s(), cpu_seconds("steal"), _swapped_pages()

    def end(self) -> MachineUse:
        """Return what was at work since the beginning, but for `other_cores`, which the ranks tell."""
        seconds = max(time.monotonic() - self._began, 1e-3)
        counted = _throttled_s(), cpu_seconds("steal"), _swapped_pages()
        throttled, stolen, pages = (now - before for now, before in zip(counted, self._counted, strict=True))
        # The run has ended: what has begun meanwhile and is there is another program.
        cores = {
            f"{name} (process {process.pid})": (used - self._programs.get(process, ("", 0.0))[1]) / seconds
            for process, (name, used) in _cpu_of_programs().items()
        }
        return MachineUse(
            programs={name: number for name, number in cores.items() if number >= MIN_CORES},
            stolen=stolen / seconds,
            throttled=throttled / seconds,
            swapped_pages=int(pages),
        )


def other_cores(profiles: Sequence[RankProfile]) -> float:
    """Return the cores that other programs kept busy while the ranks' stacks were sampled, in the mean."""
    by_cores: dict[tuple[int, ...], list[float]] = defaultdict(list)
    for profile in profiles:
        for record in profile.records:
            by_cores[record.cores].append(record.machine_s / max(record.seconds, 1e-9))
    # Ranks on the same cores have seen the same.
    busy = sum(mean(each) for each in by_cores.values())
    return max(0.0, busy - sum(profile.cores for profile in profiles))


def _cpu_of_programs() -> dict[psutil.Process, tuple[str, float]]:
    """Return name and CPU time of each process but this one; the name of an interpreter has its script, too.

    With the time of what it has started and waited for: a build or a test consists of many short processes.
    """
    programs = {}
    for process in psutil.process_iter(["name", "cmdline", "cpu_times"]):
        name, used = process.info["name"], process.info["cpu_times"]
        words = [word for word in (process.info["cmdline"] or ())[1:] if not word.startswith("-")]
        if words and name.startswith(("python", "bash", "sh", "perl")):
            name = f"{name} {Path(words[0].split()[0] if words[0].split() else '').name}".strip()
        if used is not None and process.pid != os.getpid():
            programs[process] = (name, sum(used[:4]))
    return programs


def _throttled_s() -> float:
    """Return the seconds for which a limit has stopped this process's control group, by cgroup 2 or cgroup 1."""
    for folder in reversed(cpu_control_groups()):
        stat = dict(line.split() for line in read_text(folder / "cpu.stat").splitlines())
        for name, unit_s in THROTTLED.items():
            if name in stat:
                return int(stat[name]) * unit_s
    return 0.0


def _swapped_pages() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of a kernel that does not count them
        swap = psutil.swap_memory()
    return (swap.sin + swap.sout) // PAGE
