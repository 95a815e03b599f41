"""Run `python -m hvd_trainer doctor`: report what is installed and detected here, what is wrong, and what to type.

python -m hvd_trainer doctor --hosts node1:4,node2:4 --data-dir data --log-dir runs/mnist --run

All checks run side by side, each in a thread, and share one time limit: a check that waits for a name server, a
host or a driver delays no other, and is reported as unanswered.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path

from hvd_trainer.config.checks import range_errors, refuse
from hvd_trainer.config.command_line import read_words
from hvd_trainer.errors import first_line
from hvd_trainer.horovod_build.facts import Facts
from hvd_trainer.measure.start import exit_on_sigterm
from hvd_trainer.tools.doctor import gpus, hosts, launchers, machine, network, software
from hvd_trainer.tools.doctor.context import Context, Options, Programs, look_up, read_hosts, run_probe
from hvd_trainer.tools.doctor.findings import (
    Finding,
    as_json,
    error,
    name_width,
    no_answer,
    print_findings,
    summary,
)
from hvd_trainer.utils.process import start_in_thread
from hvd_trainer.utils.text import COMMAND

Check = Callable[[Context], Iterable[Finding]]

CHECKS: dict[str, Check] = {
    "python": software.check_python,
    "packages": software.check_packages,
    "torch": software.check_torch,
    "CUDA": gpus.check_cuda,
    "NCCL": gpus.check_nccl,
    "horovod": software.check_horovod,
    "Slurm": launchers.check_slurm,
    "visible GPUs": launchers.check_visible_gpus,
    "launcher": launchers.check_variables,
    "CPU": machine.check_cpus,
    "shared memory": machine.check_shared_memory,
    "interfaces": network.check_interfaces,
    "network": network.check_route,
    "host names": network.check_names,
    "ssh": hosts.check_hosts,
    "data folder": machine.check_data_folder,
    "log folder": machine.check_log_folder,
}


@exit_on_sigterm()
def main(argv: Sequence[str]) -> int:
    """Run the checks and print their findings; return the exit code: 1 if one is an error, else 0.

    Raises:
        OptionError: an option is out of its range or not of its form.
    """
    options = read_words(Options, argv, program=f"{COMMAND} doctor")
    refuse(range_errors(options))
    began = time.monotonic()
    _announce(f"looking around, {options.timeout_s:g} s at most ...")
    with tempfile.TemporaryDirectory(prefix="hvd_trainer-doctor-", ignore_cleanup_errors=True) as folder:
        programs = Programs(os.environ, began + options.timeout_s, Path(folder))
        context = start_context(options, programs)
        try:
            findings = run_checks(context, CHECKS)
        finally:
            programs.end()
    width = name_width(findings)
    if not options.json:
        print_findings(findings, width, sys.stdout)
    if options.run and context.probe.done():
        # Imported here because it imports PyTorch, which takes seconds.
        from hvd_trainer.tools.doctor import engines

        for engine in engines.installed_engines(context.facts):
            _announce(f"starting {engines.RANKS} ranks on {engine} ...")
            findings.append(engines.prove_engine(engine, engines.device_of(context.facts, engine)))
            if not options.json:
                print_findings(findings[-1:], width, sys.stdout)
    print(as_json(findings, time.monotonic() - began) if options.json else summary(findings))
    return int(any(finding.status == "error" for finding in findings))


def _announce(text: str) -> None:
    """Tell a person at a terminal what takes so long."""
    if sys.stderr.isatty():
        print(text, file=sys.stderr)


def start_context(
    options: Options,
    programs: Programs,
    look_up: Callable[[str], list[str]] = look_up,
    probe: Callable[[Programs], Facts] = run_probe,
) -> Context:
    """Start the name look-ups and the probe of PyTorch, for which several checks wait, and return their input."""
    visited, environ = read_hosts(options.hosts), programs.environ
    names = [socket.gethostname(), "localhost", *(host.name for host in visited), environ.get("MASTER_ADDR")]
    lookups = {name: start_in_thread(partial(look_up, name), "doctor") for name in dict.fromkeys(names) if name}
    return Context(options, visited, programs, start_in_thread(partial(probe, programs), "doctor"), lookups)


def run_checks(context: Context, checks: Mapping[str, Check]) -> list[Finding]:
    """Run all checks at the same time and return their findings in the order of the table."""
    futures = {
        name: start_in_thread(partial(lambda check: [*check(context)], check), "doctor")
        for name, check in checks.items()
    }
    wait(futures.values(), timeout=context.programs.left_s())
    limit_s = context.options.timeout_s
    return [finding for name, future in futures.items() for finding in _results_of(name, future, limit_s)]


def _results_of(name: str, future: Future[list[Finding]], limit_s: float) -> list[Finding]:
    """Return the findings of a check; an error of its own if it did not end in time or raised an exception."""
    if not future.done():
        return [no_answer(name, limit_s)]
    wrong = future.exception()
    if wrong is None:
        return future.result()
    place = traceback.extract_tb(wrong.__traceback__)[-1]
    what = f"{type(wrong).__name__}: {first_line(wrong)} (line {place.lineno} in {place.name})"
    remedy = f"{COMMAND} doctor --json    (and report it: the fault is doctor's)"
    return [error(name, f"the check itself failed: {what}", remedy)]
