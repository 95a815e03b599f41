"""Does every run end cleanly? Repeats a short real job and counts the exits that are not.

    python -m benchmarks.exit_runs --runs 100 --backend ddp --launcher torchrun

Raw DDP on gloo with torch 2.15 aborts in 3 to 13 % of its runs after the work is done ("terminate called without
an active exception", SIGABRT). `--job SCRIPT ...` counts any other script's.
"""

from __future__ import annotations

import argparse
import collections
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import prepare_environment
from hvd_trainer.measure.command import command_for
from hvd_trainer.measure.start import Start, run_to_end

JOB = ["-m", "hvd_trainer.mnist", "--dataset", "digits", "--repeat", "1", "--epochs", "1", "--batch-size", "256"]
WORDS = ("terminate called", "Traceback", "Fatal", "Signal", "error:")
"""What a bad end prints, also where the launcher's exit code hides it."""


def end_of_one_run(line: list[str], limit_s: float) -> str:
    """`clean`, or in short what was wrong."""
    with tempfile.TemporaryDirectory(prefix="hvd-exit-runs-") as name:
        folder = Path(name)
        code = run_to_end(Start(line, threads=1), folder, folder / "output", limit_s=limit_s)
        said = (folder / "output").read_text(errors="replace").splitlines()
    if code is None:
        return f"no end in {limit_s:g} s"
    bad = [text for text in said if any(word in text for word in WORDS)]
    if code == 0 and not bad:
        return "clean"
    return f"exit code {code}: {bad[0][:100] if bad else 'no words'}"


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
    prepare_environment()
    job = options.job or [*JOB, "--backend", options.backend]
    line = command_for(options.launcher, options.ranks, job)
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
