"""`python -m hvd_trainer doctor`: what is installed and detected here, what is wrong with it, and what to type.

python -m hvd_trainer doctor --hosts node1:4,node2:4 --data-dir data --log-dir runs/mnist --run

All checks run side by side, each in a thread, and share one time limit: what waits for a name server, a host or a
driver holds up nobody, and is said to have given no answer.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import partial

import tyro

from hvd_trainer.errors import first_line
from hvd_trainer.tools.doctor import folders, gpus, hosts, launchers, machine, network, software, torch_facts
from hvd_trainer.tools.doctor.context import Context, Host, Options, look_up, read_hosts
from hvd_trainer.tools.doctor.finding import Finding, error, late
from hvd_trainer.tools.doctor.programs import Programs, side_by_side
from hvd_trainer.tools.doctor.report import as_json, name_width, print_findings, summary
from hvd_trainer.utils.text import COMMAND

Check = Callable[[Context], list[Finding]]

CHECKS: dict[str, Check] = {
    "python": software.check_python,
    "packages": software.check_packages,
    "torch": software.check_torch,
    "CUDA": gpus.check_cuda,
    "NCCL": gpus.check_nccl,
    "GPU links": gpus.check_links,
    "horovod": software.check_horovod,
    "MPI": launchers.check_mpi,
    "Slurm": launchers.check_slurm,
    "visible GPUs": launchers.check_visible_gpus,
    "launcher": launchers.check_variables,
    "CPU": machine.check_cpus,
    "shared memory": machine.check_shared_memory,
    "open files": machine.check_open_files,
    "InfiniBand": machine.check_infiniband,
    "interfaces": network.check_interfaces,
    "network": network.check_route,
    "host names": network.check_names,
    "ports": network.check_ports,
    "ssh": hosts.check_hosts,
    "data folder": folders.check_data,
    "log folder": folders.check_logs,
}


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0 if there is no error, else 1.

    Raises:
        OptionError: an option is out of its range or not of its form.
    """
    options = tyro.cli(Options, prog=f"{COMMAND} doctor", args=argv)
    options.check()
    visited = read_hosts(options.hosts)
    # As an exception, so that what was started ends with the doctor.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    began = time.monotonic()
    text = f"looking around, {options.timeout_s:g} s at most ..."
    with _patience(text), Programs(os.environ, began + options.timeout_s) as programs:
        situation = look_around(options, visited, programs)
        findings = examine(situation, CHECKS)
    width = name_width(findings)
    if not options.json:
        print_findings(findings, width, sys.stdout)
    if options.run and situation.seeing.done():
        findings += _prove(situation, width)
    if options.json:
        print(as_json(findings, time.monotonic() - began))
    else:
        print(summary(findings))
    return int(any(finding.status == "error" for finding in findings))


@contextmanager
def _patience(text: str) -> Iterator[None]:
    """Says on a terminal what is going on, and takes it back."""
    shown = sys.stderr.isatty()
    if shown:
        sys.stderr.write(f"{text}\r")
        sys.stderr.flush()
    try:
        yield
    finally:
        if shown:
            sys.stderr.write("\x1b[K")


def look_around(options: Options, visited: Sequence[Host], programs: Programs) -> Context:
    """Starts what several checks wait for: names are looked up, and PyTorch is asked."""
    own = [socket.gethostname(), "localhost"]
    master = os.environ.get("MASTER_ADDR")
    names = list(dict.fromkeys([*own, *(host.name for host in visited), *([master] if master else [])]))
    lookups = side_by_side([partial(look_up, name) for name in names])
    (seeing,) = side_by_side([partial(torch_facts.look, programs)])
    return Context(options, tuple(visited), os.environ, programs, seeing, dict(zip(names, lookups, strict=True)))


def examine(situation: Context, checks: dict[str, Check]) -> list[Finding]:
    """Makes all checks at the same time; their findings in the order of the list."""
    futures = side_by_side([partial(check, situation) for check in checks.values()])
    wait(futures, timeout=situation.programs.all_left_s)
    return [
        finding
        for name, future in zip(checks, futures, strict=True)
        for finding in _outcome(name, future, situation.options.timeout_s)
    ]


def _outcome(name: str, future: Future[list[Finding]], limit_s: float) -> list[Finding]:
    """What a check has found; a finding of its own if it found no end, or failed."""
    if not future.done():
        return [late(name, limit_s)]
    wrong = future.exception()
    if wrong is None:
        return future.result()
    place = traceback.extract_tb(wrong.__traceback__)[-1]
    what = f"{type(wrong).__name__}: {first_line(wrong)}"
    found = f"the check itself failed: {what} (line {place.lineno} in {place.name})"
    return [error(name, found, f"{COMMAND} doctor --json    (and report it: the fault is doctor's)")]


def _prove(situation: Context, width: int) -> list[Finding]:
    """The engines' findings, printed as they come: ranks take a while to start."""
    # Not before it is needed: it imports PyTorch.
    from hvd_trainer.tools.doctor import all_reduce

    findings = []
    for engine in all_reduce.engines(situation.seen):
        with _patience(f"starting {all_reduce.RANKS} ranks on {engine} ..."):
            finding = all_reduce.prove_engine(engine, all_reduce.device_of(situation.seen, engine))
        findings.append(finding)
        if not situation.options.json:
            print_findings([finding], width, sys.stdout)
    return findings
