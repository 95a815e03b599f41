"""Describe the machine and the versions that a measurement depends on."""

from __future__ import annotations

import os
import platform
import re
import shlex
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from hvd_trainer.measure.stale import digest_of_package
from hvd_trainer.utils.process import cpu_ids
from hvd_trainer.utils.text import plural

MAX_BUSY = 0.25
"""Fraction of the cores that other programs may keep busy without disturbing a measurement."""
WATCH_S = 1.0
"""Seconds for which they are watched."""
BUSY = ("user", "nice", "system", "irq", "softirq", "steal")
"""Kinds of time in which a core is not idle."""
OWN_GROUPS, CONTROL_GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


class Ran(NamedTuple):
    """When, where and by which command a tool was run."""

    command: str
    date: str
    host: str
    cores: int
    load: float
    """of the minute before it began"""

    @classmethod
    def now(cls, program: str, argv: Sequence[str]) -> Ran:
        """Return what is known at the start of a tool.

        Args:
            program: as it is typed, such as `python -m hvd_trainer compare`.
            argv: the words behind it.
        """
        command = f"{program} {shlex.join(argv)}"
        load = round(os.getloadavg()[0], 1)
        return cls(command, time.strftime("%Y-%m-%d %H:%M"), platform.node(), len(cpu_ids()), load)

    def __str__(self) -> str:
        return f"{self.date}, {self.host}, {plural(self.cores, 'core')}, load {self.load:g} at the start"


def describe_machine() -> dict[str, Any]:
    """Return the machine's properties and the versions of its software by name, in plain JSON."""
    import torch

    from hvd_trainer.utils import accelerator

    gpus = accelerator.names()
    return {
        "host": platform.node(),
        "cores": len(cpu_ids()),
        "cpu": _cpu_model(),
        **({"gpus": ", ".join(gpus)} if gpus else {}),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "horovod": _version("horovod"),
        "hvd_trainer": _version("hvd_trainer"),
    }


def as_text(machine: Mapping[str, Any]) -> str:
    """Return a machine's properties as `cores 2, torch 2.11.0`."""
    return ", ".join(f"{name} {value}" for name, value in machine.items())


def conditions(machine: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the figures of a run depend on whatever the job: properties of the machine, and this package."""
    names = ("host", "cpu", "cores", "gpus", "python", "torch", "horovod")
    return {"package": digest_of_package(), **{name: machine[name] for name in names if name in machine}}


def cpu_seconds(*kinds: str) -> float:
    """Return the seconds of these kinds, such as `user`, so far, of the cores that this process may use."""
    cores = psutil.cpu_times(percpu=True)
    return sum(getattr(cores[n], kind, 0.0) for n in cpu_ids() if n < len(cores) for kind in kinds)


def threads_per_rank(ranks: int) -> int:
    """Return how many CPU threads each rank can have on cores of its own; 1 where ranks share them."""
    return max(1, len(cpu_ids()) // ranks)


def busy_warning() -> str:
    """Return a warning if other programs keep this machine busy, for which it watches a second; else nothing.

    The load of the machine would not tell: it has what the tool's own trials did in the minutes before.
    """
    began, busy_s, own_s = time.monotonic(), cpu_seconds(*BUSY), time.process_time()
    time.sleep(WATCH_S)
    others = (cpu_seconds(*BUSY) - busy_s - (time.process_time() - own_s)) / (time.monotonic() - began)
    cores = len(cpu_ids())
    if others < MAX_BUSY * cores:
        return ""
    return (
        f"other programs keep {min(others, cores):.1f} of {plural(cores, 'core')} busy here: expect the figures "
        f"to scatter"
    )


def cpu_control_groups() -> list[Path]:
    """Return the folders of this process's control group for CPUs and of those above it, the outermost first.

    Any of them may set a limit, and a container may not have the inner ones under their names outside.
    """
    folders: list[Path] = []
    for line in read_text(OWN_GROUPS).splitlines():
        number, controllers, path = line.split(":", 2)
        if number != "0" and "cpu" not in controllers.split(","):
            continue
        # Those of version 2 have the number 0.
        tops = [CONTROL_GROUPS] if number == "0" else [CONTROL_GROUPS / controllers, CONTROL_GROUPS / "cpu"]
        parts = Path(path.lstrip("/")).parts
        folders += [top.joinpath(*parts[:length]) for top in tops for length in range(len(parts) + 1)]
    return folders


def read_text(file: Path) -> str:
    """Return the content of a file; empty if it cannot be read."""
    with suppress(OSError):
        return file.read_text().strip()
    return ""


def _cpu_model() -> str:
    match = re.search(r"^model name.*?: *(.+)$", read_text(Path("/proc/cpuinfo")), re.MULTILINE)
    return match[1].strip() if match else platform.machine()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
