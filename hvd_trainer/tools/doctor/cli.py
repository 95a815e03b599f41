"""Run `python -m hvd_trainer doctor`: report what is installed and detected here, what is wrong, and what to type.

python -m hvd_trainer doctor --hosts node1:4,node2:4 --data-dir data --log-dir runs/mnist --run

All checks run side by side, each in a thread, and share one time limit: a check that waits for a name server, a
host or a driver delays no other, and is reported as unanswered.
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
from hvd_trainer.tools.doctor import folders, gpus, hosts, launchers, machine, network, software
from hvd_trainer.tools.doctor.context import Context, Host, Options, look_up, read_hosts, run_probe
from hvd_trainer.tools.doctor.finding import (
    Finding,
    as_json,
    error,
    name_width,
    no_answer,
    print_findings,
    summary,
)
from hvd_trainer.tools.doctor.programs import Programs
from hvd_trainer.utils.text import COMMAND
from hvd_trainer.utils.threads import start_in_thread

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
    """Run the checks and print their findings; return the exit code: 1 if one is an error, else 0.

    Raises:
        OptionError: an option is out of its range or not of its form.
    """
    options = tyro.cli(Options, prog=f"{COMMAND} doctor", args=argv)
    options.check()
    visited = read_hosts(options.hosts)
    # SIGTERM becomes an exception, so that the `with` block below ends the programs that were started.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    began = time.monotonic()
    text = f"looking around, {options.timeout_s:g} s at most ..."
    with _transient_line(text), Programs(os.environ, began + options.timeout_s) as programs:
        context = build_context(options, visited, programs)
        findings = run_checks(context, CHECKS)
    width = name_width(findings)
    if not options.json:
        print_findings(findings, width, sys.stdout)
    if options.run and context.probe.done():
        findings += _prove(context, width)
    if options.json:
        print(as_json(findings, time.monotonic() - began))
    else:
        print(summary(findings))
    return int(any(finding.status == "error" for finding in findings))


@contextmanager
def _transient_line(text: str) -> Iterator[None]:
    """Show a line on a terminal's stderr while the block runs, then erase it."""
    is_terminal = sys.stderr.isatty()
    if is_terminal:
        sys.stderr.write(f"{text}\r")
        sys.stderr.flush()
    try:
        yield
    finally:
        if is_terminal:
            sys.stderr.write("\x1b[K")


def build_context(options: Options, visited: Sequence[Host], programs: Programs) -> Context:
    """Start what several checks wait for, the name look-ups and the probe of PyTorch, and return the checks'
    context.
    """
    own = [socket.gethostname(), "localhost"]
    master = os.environ.get("MASTER_ADDR")
    names = list(dict.fromkeys([*own, *(host.name for host in visited), *([master] if master else [])]))
    lookups = [start_in_thread(partial(look_up, name), "doctor") for name in names]
    probe = start_in_thread(partial(run_probe, programs), "doctor")
    return Context(options, tuple(visited), os.environ, programs, probe, dict(zip(names, lookups, strict=True)))


def run_checks(context: Context, checks: dict[str, Check]) -> list[Finding]:
    """Run all checks at the same time and return their findings in the order of the table."""
    futures = [start_in_thread(partial(check, context), "doctor") for check in checks.values()]
    wait(futures, timeout=context.programs.check_left_s)
    return [
        finding
        for name, future in zip(checks, futures, strict=True)
        for finding in _results_of(name, future, context.options.timeout_s)
    ]


def _results_of(name: str, future: Future[list[Finding]], limit_s: float) -> list[Finding]:
    """Return the findings of a check; an error of its own if it did not end in time or raised an exception."""
    if not future.done():
        return [no_answer(name, limit_s)]
    wrong = future.exception()
    if wrong is None:
        return future.result()
    place = traceback.extract_tb(wrong.__traceback__)[-1]
    what = f"{type(wrong).__name__}: {first_line(wrong)}"
    found = f"the check itself failed: {what} (line {place.lineno} in {place.name})"
    return [error(name, found, f"{COMMAND} doctor --json    (and report it: the fault is doctor's)")]


def _prove(context: Context, width: int) -> list[Finding]:
    """Run the ranks of each engine in turn, print each finding as it comes, and return them all."""
    # Imported here because it imports PyTorch, which takes seconds.
    from hvd_trainer.tools.doctor import all_reduce

    findings = []
    for engine in all_reduce.engines(context.facts):
        with _transient_line(f"starting {all_reduce.RANKS} ranks on {engine} ..."):
            finding = all_reduce.prove_engine(engine, all_reduce.device_of(context.facts, engine))
        findings.append(finding)
        if not context.options.json:
            print_findings([finding], width, sys.stdout)
    return findings
