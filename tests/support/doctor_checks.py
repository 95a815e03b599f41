"""Run the doctor as a whole, or some of its checks by themselves."""

from __future__ import annotations

import json
import os
import socket
import textwrap
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from launchers import Result, launch

from hvd_trainer.horovod_build.facts import Facts, TorchFacts
from hvd_trainer.tools.doctor import cli
from hvd_trainer.tools.doctor.context import Context, Options, look_up, read_hosts
from hvd_trainer.tools.doctor.finding import Finding
from hvd_trainer.tools.doctor.programs import Programs
from hvd_trainer.utils.threads import start_in_thread

DOCTOR = ["-m", "hvd_trainer", "doctor"]
TORCH = TorchFacts(
    version="2.15.0+cu132",
    cuda="13.2",
    kind="cuda",
    nccl="2.30.7",
    nccl_version="2.30.7",
    architectures=("sm_80", "sm_90", "compute_90"),
)
STATUSES = ("ok", "warning", "error")
OTHER = "127.0.0.2"
"""Another host, as it seems: it is this machine, too, but none of its interfaces has that address."""


PATIENT = ("--timeout-s", "40")
"""Where it is not about time: the machine may have a lot else to do."""


def run(*options: str, **more: Any) -> Result:
    """Run the tool as a user starts it."""
    return launch("python", 1, [*DOCTOR, *options], check=False, timeout_s=60, **more)


def document(result: Result) -> dict[str, Any]:
    """Parse the document that --json printed and check its form."""
    found: dict[str, Any] = json.loads(result.stdout)
    names = [finding["name"] for finding in found["findings"]]
    assert len(names) == len(set(names)), names
    assert set(found) == {"hvd_trainer", "host", "time", "seconds", "counts", "findings"}
    for finding in found["findings"]:
        assert set(finding) == {"name", "status", "found", "remedy", "figures"}
        assert (finding["status"] == "ok") == (not finding["remedy"]), finding
    counted = [sum(f["status"] == status for f in found["findings"]) for status in STATUSES]
    assert list(found["counts"].values()) == counted
    assert result.returncode == int(found["counts"]["error"] > 0)
    return found


def run_checks(
    *names: str,
    environ: Mapping[str, str] | None = None,
    facts: Facts | None = None,
    limit_s: float = 40.0,
    look_up: Callable[[str], list[str]] = look_up,
    **options: Any,
) -> list[Finding]:
    """Run some of the checks as the tool runs them, without the probe of PyTorch."""
    chosen = Options(**options)
    hosts = read_hosts(chosen.hosts)
    variables = {**os.environ, **(environ or {})}
    known = [socket.gethostname(), "localhost", *(host.name for host in hosts)]
    lookups = {name: start_in_thread(partial(look_up, name), "doctor") for name in known}
    probe: Future[Facts] = Future()
    probe.set_result(facts or Facts(TorchFacts(version="2.15.0")))
    with Programs(variables, time.monotonic() + limit_s) as programs:
        context = Context(chosen, hosts, variables, programs, probe, lookups)
        return cli.run_checks(context, {name: cli.CHECKS[name] for name in names})


def only(findings: list[Finding], name: str) -> Finding:
    """Return the one finding of a name."""
    (found,) = [finding for finding in findings if finding.name == name]
    return found


def write_ssh(folder: Path, script: str) -> None:
    """Write an `ssh` that runs a script; `$command` in it is the command for the other host."""
    program = folder / "ssh"
    program.write_text(f"#!/bin/sh\nfor command; do :; done\n{textwrap.dedent(script)}\n")
    program.chmod(0o755)
