"""The runner: stages in order, each with a time budget; a report; an exit code."""

from __future__ import annotations

import argparse
import itertools
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import process_tree
import torch

from gpu import failures, install, memory, ranks, several, speed
from gpu.bench import MARK, Bench, Check, FailedError, MissingError
from gpu.report import FAILED, MEASURED, NOT_HERE, PROVEN, Outcome, Report, Status, outcome
from hvd_trainer.utils import accelerator

NO_GPU = 69
"""EX_UNAVAILABLE of sysexits.h."""
BUDGET_S = 1_450.0
"""For all stages; of the 25 minutes that docs/gpu.md names, a minute is left for their ends."""
QUICK = 2


class Stage(NamedTuple):
    """Checks that share a time limit.

    Args:
        checks: what there is to prove.
        budget_s: seconds, at most.
        at_once: how many checks run at the same time on a GPU; what is timed runs alone.
    """

    checks: Callable[[Bench], Iterable[Check]]
    budget_s: float
    at_once: int = 1


STAGES = {
    "facts": Stage(install.facts, 60),
    "build": Stage(install.build, 420),
    "one-rank": Stage(ranks.one_rank, 200, 4),
    "nccl": Stage(ranks.nccl, 240, 3),
    "scripts": Stage(ranks.scripts, 60, 2),
    "failures": Stage(failures.failures, 180, 3),
    "several": Stage(several.several, 300),
    "cpu-horovod": Stage(install.cpu_horovod, 150),
    "gloo": Stage(ranks.gloo, 80, 2),
    "memory": Stage(memory.memory, 120),
    "speed": Stage(speed.speed, 600),
}
"""In the order in which they run, what matters most first: all together may take longer than `BUDGET_S`."""


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python tests/gpu",
        description="Prove on this machine's GPUs what can be proved. Exit codes: 0 all that could be proved is "
        f"proven, 1 something failed, {NO_GPU} there is no GPU.",
    )
    names = ",".join(STAGES)
    parser.add_argument("--stages", default=names, help=f"some of {names}")
    parser.add_argument(
        "--device", choices=["gpu", "cpu"], default="gpu", help="cpu: to try the checks themselves"
    )
    parser.add_argument("--quick", action="store_true", help=f"only the first {QUICK} checks of each stage")
    parser.add_argument("--out", type=Path, default=Path(), help="folder for the report")
    parser.add_argument(
        "--add", type=Path, help="an earlier gpu-report.json: its other stages are in the report, too"
    )
    parser.add_argument("--data-dir", type=Path, help="MNIST's folder")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="seconds for all stages")
    args = parser.parse_args(argv)
    args.stages = args.stages.split(",")
    if unknown := set(args.stages) - set(STAGES):
        parser.error(f"--stages: there is no {', '.join(sorted(unknown))}; there are {names}")
    return args


def main(argv: Sequence[str]) -> int:
    """Run the stages; return the exit code."""
    args = arguments(argv)
    device = "cpu" if args.device == "cpu" else accelerator.kind()
    if device is None:
        print(
            f"gpu-test: PyTorch {torch.__version__} sees no GPU here ({install.machine()['GPUs']}): run it on a "
            f"machine with one; --device cpu tries the checks themselves",
            file=sys.stderr,
        )
        return NO_GPU
    about = {
        "device": device,
        **install.machine(),
        "torch": torch.__version__,
        "Python": sys.version.split()[0],
        "commit": install.output_of(["git", "rev-parse", "--short", "HEAD"]),
        "typed": " ".join(["python tests/gpu", *argv]),
    }
    report = Report(args.out.resolve(), about, args.add, args.stages)
    data_dir = None if args.data_dir is None else args.data_dir.resolve()
    work = Path(tempfile.mkdtemp(prefix="gpu-test-"))
    # Two CPUs stand for two GPUs.
    bench = Bench(device, 2 if device == "cpu" else accelerator.count(device), data_dir, work)
    deadline = time.monotonic() + args.budget_s
    # As an exception, so that what it has started ends with it.
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        for name in (name for name in STAGES if name in args.stages):
            run_stage(name, bench, deadline, report, quick=args.quick)
    finally:
        signal.signal(signal.SIGTERM, before)
        process_tree.kill_all_marked(MARK)
        shutil.rmtree(work, ignore_errors=True)
    print(report.summary(), flush=True)
    return int(any(its.status == FAILED for its in report.new))


def run_stage(name: str, bench: Bench, deadline: float, report: Report, *, quick: bool) -> None:
    """Prove what the stage has, as far as its time goes."""
    stage = STAGES[name]
    # CPUs take longer, and are not what the budgets are for.
    budget_s = stage.budget_s if bench.on_gpu else 5 * stage.budget_s
    until = min(deadline, time.monotonic() + budget_s)
    began, at_once = time.monotonic(), stage.at_once if bench.on_gpu else 1
    print(f"{name}: {until - began:.0f} s at most", flush=True)
    with ThreadPoolExecutor(at_once) as pool:
        limited = replace(bench, until=until)
        checks = itertools.islice(stage.checks(limited), QUICK if quick else None)
        for its in pool.map(partial(prove_check, name, limited), checks):
            report.add(its)
            text = its.why or "; ".join(f"{key} {value}" for key, value in its.figures.items())
            print(f"  {its.status:17} {its.name} ({its.seconds:.0f} s) {text[:300]}".rstrip(), flush=True)


def prove_check(stage: str, bench: Bench, check: Check) -> Outcome:
    """Run one check on a bench of its own."""
    own = replace(bench, ran=[])
    began = time.monotonic()
    status: Status = MEASURED if check.measures else PROVEN
    why, figures = "", {}
    try:
        lacking = [need for need in map(own.lacks, check.needs) if need is not None]
        if lacking:
            raise MissingError(", ".join(lacking))
        figures = check.prove(own, *check.args) or {}
    except MissingError as missing:
        status, why = NOT_HERE, f"it needs {missing}"
    except FailedError as failed:
        status, why = FAILED, str(failed)
    except Exception as error:  # one check's own mistake is no reason to lose the others
        status, why = FAILED, f"the check itself: {type(error).__name__}: {error}"
    return outcome(stage, check, status, why, time.monotonic() - began, figures, own.ran)
