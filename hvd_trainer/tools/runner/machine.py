"""Describe the machine and the versions that a measurement depends on."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from hvd_trainer.utils.process import cpu_ids

MAX_LOAD = 0.5
"""Load per core from which a measurement is disturbed."""


def describe_machine() -> dict[str, Any]:
    """Return the machine's properties and the versions of its software by name, in plain JSON."""
    import torch

    from hvd_trainer.utils import accelerator

    gpus = accelerator.names()
    return {
        "cores": len(cpu_ids()),
        "cpu": _cpu_model(),
        **({"gpus": ", ".join(gpus)} if gpus else {}),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "horovod": _version("horovod"),
        "hvd_trainer": _version("hvd_trainer"),
    }


def versions(machine: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of a machine's properties on which the figures of a run depend."""
    return {name: machine[name] for name in ("python", "torch", "horovod")}


def threads_per_rank(ranks: int) -> int:
    """Return how many CPU threads each rank can have on cores of its own; 1 where ranks share them."""
    return max(1, len(cpu_ids()) // ranks)


def num_gpus() -> int:
    """Return how many GPUs PyTorch sees."""
    from hvd_trainer.utils import accelerator

    return accelerator.count(accelerator.kind())


def warn_if_busy() -> None:
    """Print a warning if other programs have kept this machine busy in the last minute."""
    load, cores = os.getloadavg()[0], len(cpu_ids())
    if load >= MAX_LOAD * cores:
        text = f"other programs are at work here (load {load:.1f} on {cores} cores): expect the figures to scatter"
        print(f"warning: {text}", file=sys.stderr)


def _cpu_model() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
