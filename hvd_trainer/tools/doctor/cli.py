"""Run `python -m hvd_trainer doctor`: report what is installed and detected here, what is wrong, and what to type.

python -m hvd_trainer doctor --hosts node1:4,node2:4 --data-dir data --log-dir runs/mnist --run

All checks run side by side, each in a thread, and share one time limit: a check that waits for a name server, a
host or a driver delays no other, and is reported as unanswered.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import partial

from hvd_trainer.config.command_line import read_words
from hvd_trainer.errors import first_line
from hvd_trainer.measure.start import exit_on_signals
from hvd_trainer.tools.doctor import gpus, hosts, launchers, machine, network, software
from hvd_trainer.tools.doctor.context import Context, Options, ending_programs
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
    "GPU links": gpus.check_links,
    "horovod": software.check_horovod,
    "MPI": launchers.check_mpi,
    "Slurm": launchers.check_slurm,
    "visible GPUs": launchers.check_visible_gpus,
    "launcher": launchers.check_variables,
    "CPU": machine.check_cpus,
    "shared memory": machine.check_shared_memory,
    "open files": machine.check_open_files,
    "interfaces": network.check_interfaces,
    "network": network.check_route,
    "host names": network.check_names,
    "port": network.check_port,
    "ssh": hosts.check_hosts,
    "data folder": machine.check_data_folder,
    "log folder": machine.check_log_folder,
}


@exit_on_signals()
def main(argv: Sequence[str]) -> int:
    """Run the checks and print their findings; return the exit code: 1 if one is an error, else 0.

    Raises:
        OptionError: an option is out of its range or not of its form.
    """
    options = read_words(Options, argv, program=f"{COMMAND} doctor")
    options.check()
    began = time.monotonic()
    text = f"looking around, {options.timeout_s:g} s at most ..."
    with _transient_line(text), ending_programs(os.environ, began + options.timeout_s) as programs:
        context = Context(options, programs, os.environ)
        findings = run_checks(context, CHECKS)
    width = name_width(findings)
    if not options.json:
        print_findings(findings, width, sys.stdout)
    if options.run and context.probe.done():
        # Imported here because it imports PyTorch, which takes seconds.
        from hvd_trainer.tools.doctor import engines

        for engine, device in engines.devices_of_engines(context.facts).items():
            with _transient_line(f"starting {engines.RANKS} ranks on {engine} ..."):
                findings.append(engines.prove_engine(engine, device))
            if not options.json:
                print_findings(findings[-1:], width, sys.stdout)
    print(as_json(findings, time.monotonic() - began) if options.json else summary(findings))
    return int(any(finding.status == "error" for finding in findings))


@contextmanager
def _transient_line(text: str) -> Iterator[None]:
    """Show a line on a terminal's stderr while the block runs, then erase it."""
    shown, erased = (f"{text}\r", "\x1b[K") if sys.stderr.isatty() else ("", "")
    print(shown, end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        print(erased, end="", file=sys.stderr, flush=True)


def run_checks(context: Context, checks: Mapping[str, Check]) -> list[Finding]:
    """Run all checks at the same time and return their findings in the order of the table."""
    futures = {name: start_in_thread(partial(_run, check, context), "doctor") for name, check in checks.items()}
    wait(futures.values(), timeout=context.programs.left_s())
    limit_s = context.options.timeout_s
    return [finding for name, future in futures.items() for finding in _results_of(name, future, limit_s)]


def _run(check: Check, context: Context) -> list[Finding]:
    return list(check(context))


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
