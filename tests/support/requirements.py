"""What this machine must have for a test, as pytest marks whose reason names what to install."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from functools import cache, partial
from pathlib import Path

import pytest
import slurm_cluster

LAUNCHERS = ("horovodrun", "torchrun", "mpirun", "srun", "python")

QUICKEST = "warm"
"""Where it does not matter who starts the ranks: torchrun's import of PyTorch takes longer than many a test. See
warm_server.py."""


def requires(*names: str) -> pytest.MarkDecorator:
    """Return a mark that skips the test unless everything named is there."""
    reasons = [reason for reason in map(missing, names) if reason is not None]
    return pytest.mark.skipif(bool(reasons), reason="; ".join(dict.fromkeys(reasons)))


HOROVODRUN = Path(sys.executable).with_name("horovodrun")


@cache
def _missing_horovod() -> str | None:
    spec = importlib.util.find_spec("horovod")
    folders = spec.submodule_search_locations if spec is not None else None
    # The extension's file: importing Horovod to see takes seconds, and works without it.
    built = any(any(Path(folder).glob("torch/mpi_lib_v2*.so")) for folder in folders or ())
    if built and HOROVODRUN.exists():
        return None
    return "Horovod for this PyTorch is not installed: python -m hvd_trainer install-horovod"


@cache
def _missing_mpirun() -> str | None:
    if shutil.which("mpirun") is None:
        return "no mpirun on this machine: apt-get install openmpi-bin"
    asked = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=False)
    if "Open MPI" not in asked.stdout:
        return "mpirun is not Open MPI's: apt-get install openmpi-bin"
    return None


def _missing_hosts() -> str | None:
    # Not above: what the ranks of tests import, they import from anywhere.
    from benchmarks import hosts

    return hosts.missing()


PACKAGES = {
    "ch-run": "charliecloud",
    "git": "git",
    "java": "default-jre-headless",
    "mpicxx": "libopenmpi-dev",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "sshd": "openssh-server",
    "sysctl": "procps",
}
"""Programs that a test starts by themselves, with the Debian package that each is in."""


def _missing_program(name: str) -> str | None:
    # Debian keeps servers where only root's PATH leads.
    found = shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin")
    return None if found else f"no {name} on this machine: apt-get install {PACKAGES[name]}"


def _missing_module(name: str, extra: str) -> str | None:
    if importlib.util.find_spec(name):
        return None
    return f"{name} is not installed: pip install -c constraints.txt '.[{extra}]'"


def _missing_spark() -> str | None:
    return _missing_module("pyspark", "clusters") or _missing_program("java")


def missing(name: str) -> str | None:
    """Return why a launcher cannot be used here; None where it can.

    Also "horovod" under any launcher, "hosts" of namespaces, "mpi4py", "ray", "spark", and programs.

    Raises:
        ValueError: no such name.
    """
    checks = {
        **{program: partial(_missing_program, program) for program in PACKAGES},
        "horovod": _missing_horovod,
        "horovodrun": _missing_horovod,
        "hosts": _missing_hosts,
        "mpi4py": partial(_missing_module, "mpi4py", "test"),
        "mpirun": _missing_mpirun,
        "ray": partial(_missing_module, "ray", "clusters"),
        "spark": _missing_spark,
        "srun": slurm_cluster.missing,
        "torchrun": lambda: None,
        "python": lambda: None,
        QUICKEST: lambda: None,
    }
    if name not in checks:
        raise ValueError(f"nothing known about {name!r}; known are {', '.join(checks)}")
    return checks[name]()
