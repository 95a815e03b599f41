"""Does every run end cleanly? Repeats a short real job and counts the exits that are not.

    python -m benchmarks.exit_runs --runs 100 --backend ddp --launcher torchrun

Raw DDP on gloo with torch 2.15 aborts in 3 to 13 % of its runs after the work is done ("terminate called without
an active exception", SIGABRT). `--job SCRIPT ...` counts any other script's.
"""

from __future__ import annotations

import argparse
import collections
import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks import NO_GPUS

REPOSITORY = Path(__file__).resolve().parent.parent
JOB = ["-m", "hvd_trainer.mnist", "--dataset", "digits", "--epochs", "1", "--batch-size", "256"]
WORDS = ("terminate called", "Traceback", "Fatal", "Signal", "error:")
"""What a bad end prints, also where the launcher's exit code hides it."""


def command(launcher: str, ranks: int, job: list[str]) -> list[str]:
    """The command line of one run."""
    if launcher == "torchrun":
        return [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(ranks),
            *job,
        ]
    return [str(Path(sys.executable).with_name("horovodrun")), "-np", str(ranks), sys.executable, *job]


def end_of_one_run(line: list[str], limit_s: float) -> str:
    """`clean`, or in short what was wrong."""
    environ = {**os.environ, **NO_GPUS, "OMP_NUM_THREADS": "1"}
    try:
        run = subprocess.run(line, cwd=REPOSITORY, env=environ, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return f"no end in {limit_s:g} s"
    said = [text for text in (run.stdout + run.stderr).splitlines() if any(word in text for word in WORDS)]
    if run.returncode == 0 and not said:
        return "clean"
    return f"exit code {run.returncode}: {said[0][:100] if said else 'no words'}"


def main() -> int:
    """Prints the count of each kind of end; 1 if any was not clean."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--backend", choices=("ddp", "horovod"), default="ddp")
    parser.add_argument("--launcher", choices=("torchrun", "horovodrun"), default="torchrun")
    parser.add_argument("--limit-s", type=float, default=120, help="a run that takes longer hangs")
    parser.add_argument("--job", nargs=argparse.REMAINDER, help="what follows python, instead of the MNIST job")
    options = parser.parse_args()
    job = options.job or [*JOB, "--backend", options.backend]
    line = command(options.launcher, options.ranks, job)
    print("$", " ".join(line), flush=True)
    ends: collections.Counter[str] = collections.Counter()
    began = time.perf_counter()
    for number in range(1, options.runs + 1):
        end = end_of_one_run(line, options.limit_s)
        ends[end] += 1
        if end != "clean":
            print(f"run {number}: {end}", flush=True)
    seconds = time.perf_counter() - began
    print(f"{options.runs} runs of {options.ranks} ranks in {seconds:.0f} s: {dict(ends)}")
    return 0 if set(ends) == {"clean"} else 1


if __name__ == "__main__":
    sys.exit(main())
