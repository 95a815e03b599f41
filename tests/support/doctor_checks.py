"""Run some of the doctor's checks in a planted situation."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hvd_trainer.horovod_build.facts import Facts, Gpu, TorchFacts
from hvd_trainer.tools.doctor import cli
from hvd_trainer.tools.doctor.context import Context, Options, ending_programs, look_up
from hvd_trainer.tools.doctor.findings import Finding

TORCH = TorchFacts(
    version="2.15.0+cu132",
    cuda="13.2",
    kind="cuda",
    nccl="2.30.7",
    nccl_version="2.30.7",
    architectures=("sm_80", "sm_90", "compute_90"),
)
H100 = Gpu("NVIDIA H100 80GB HBM3", 79 * 2**30, "9.0", "5baec991-de63-c196-1766-04c38407e133")
ONE = replace(TORCH, gpus=[H100])
PAIR = replace(TORCH, gpus=[H100, replace(H100, uuid="02c05ee3")])
SMI_FAILS = "echo 'Failed to initialize NVML: Driver/library version mismatch' >&2; exit 18"
OTHER = "127.0.0.2"
"""Another host, as it seems: it is this machine, too, but none of its interfaces has that address."""


def run_checks(
    *names: str,
    environ: Mapping[str, str] | None = None,
    torch: TorchFacts = TORCH,
    facts: Facts | None = None,
    limit_s: float = 40.0,
    look_up: Callable[[str], list[str]] = look_up,
    **options: Any,
) -> list[Finding]:
    """Run some of the checks as the tool runs them, without the probe of PyTorch."""
    variables = {**os.environ, **(environ or {})}
    with ending_programs(variables, time.monotonic() + limit_s) as programs:
        context = Context(Options(**options), programs, variables, look_up, lambda: facts or Facts(torch))
        return cli.run_checks(context, {name: cli.CHECKS[name] for name in names})


def plant_program(folder: Path, name: str, script: str) -> dict[str, str]:
    """Write a program that runs a script, and return the environment in which it is the first of its name.

    The last word of its command line is `$command`: that of ssh is the command for the other host.
    """
    program = folder / name
    program.write_text(f"#!/bin/sh\nfor command; do :; done\n{script}\n")
    program.chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def plant_package(folder: Path, name: str, version: str) -> None:
    (folder / f"{name}-{version}.dist-info").mkdir(parents=True)
    (folder / f"{name}-{version}.dist-info/METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
