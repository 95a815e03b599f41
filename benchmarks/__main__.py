"""Measure training speed side by side, in interleaved rounds; prints a table for each job.

python -m benchmarks --data-dir ../shared/data/mnist --ranks 2,4 --rounds 5
python -m benchmarks --only "*DDP*" "*ddp*" "*floor*" --ranks 2 --rounds 3
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from torchvision import datasets

from benchmarks import prepare_environment
from benchmarks.contestants import CONTESTANTS, IMAGES, JOBS, MNIST, SCRIPTS, TOKENS, Contestant, Job
from benchmarks.raw import files
from benchmarks.trials import BenchmarkTrial, conclude
from hvd_trainer.measure.figures import are_figures
from hvd_trainer.measure.machine import Ran, busy_warning, describe_machine
from hvd_trainer.measure.measured import describe_speed
from hvd_trainer.measure.results import TrialResult
from hvd_trainer.measure.tool_folder import locked_folder
from hvd_trainer.measure.trials import TrialRunner


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data-dir", type=Path, default=Path("data"), help="where MNIST is, and files are made")
    parser.add_argument("--jobs", nargs="+", choices=[*JOBS], default=["mnist"])
    parser.add_argument("--ranks", type=_counts, default=[2], help="such as 2 or 2,4")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", metavar="PATTERN", default=["*"], help="contestants by name")
    parser.add_argument("--list", action="store_true", help="show the contestants and stop")
    parser.add_argument("--limit-s", type=float, default=300.0, help="for one run")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks"), help="folder; resumes from its runs")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds}: at least 1 is needed")
    args.contestants = _chosen(args.jobs, args.only)
    if not args.contestants:
        parser.error(f"--only {' '.join(args.only)}: no contestant is named so; try --list")
    return args


def _counts(text: str) -> list[int]:
    """argparse turns the ValueError of a word that is no number into its own message."""
    counts = [int(word) for word in text.split(",")]
    if min(counts) < 1:
        raise argparse.ArgumentTypeError(f"{text}: a number of ranks is at least 1")
    return counts


def _chosen(jobs: list[str], patterns: list[str]) -> list[Contestant]:
    return [
        contestant
        for contestant in CONTESTANTS
        if any(contestant.job in JOBS[job] for job in jobs)
        and any(fnmatchcase(contestant.name, pattern) for pattern in patterns)
    ]


def prepare_data(jobs: Iterable[Job], data_dir: Path) -> None:
    """Once, before anything is timed; nothing is fetched or made if the files are there."""
    jobs = {*jobs}
    if jobs & {MNIST, SCRIPTS}:
        datasets.MNIST(data_dir, download=True)
    for kind in [kind for kind, job in (("images", IMAGES), ("tokens", TOKENS)) if job in jobs]:
        files.make(data_dir, kind)
    (data_dir / "numbers").mkdir(parents=True, exist_ok=True)
    for samples in {job.samples for job in jobs if job.max_steps}:
        with (data_dir / "numbers" / str(samples)).open("ab") as file:  # of holes, which take no room
            file.truncate(4 * samples)


def measure(runner: TrialRunner, trials: Sequence[BenchmarkTrial], rounds: int) -> None:
    """All in each round, forwards in one and backwards in the next; one that failed is tried in the next again."""
    if text := busy_warning():
        runner.warn(text)
    for _, left in groupby(runner.to_do(trials, rounds), key=itemgetter(0)):
        for _ in runner.run_all([*left], describe=describe_speed):
            pass


def main() -> int:
    args = parse_args()
    ran = Ran.now("python -m benchmarks", sys.argv[1:])
    if args.list:
        for contestant in args.contestants:
            missing = "" if contestant.is_here else f", needs {contestant.needs}, which is not installed"
            print(f"{contestant.job.name}: {contestant.name} ({contestant.engine}{missing})")
        return 0
    for contestant in args.contestants:
        if not contestant.is_here:
            print(f"{contestant.name} is left out: {contestant.needs} is not installed", file=sys.stderr)
    chosen = [contestant for contestant in args.contestants if contestant.is_here]
    data_dir, machine = args.data_dir.resolve(), describe_machine()
    prepare_data((contestant.job for contestant in chosen), data_dir)
    prepare_environment()
    trials = [
        BenchmarkTrial.of(contestant, ranks, data_dir, machine)
        for ranks in args.ranks
        for contestant in chosen
        if ranks == 1 or contestant.engine != "single"
    ]
    with locked_folder(args.out, "benchmarks") as folder:
        runner = TrialRunner(folder, limit_s=args.limit_s, limit_option="--limit-s", are_figures=are_figures)
        measure(runner, trials, args.rounds)
        results = TrialResult.collect(trials, list(runner.last.values()))
        report = conclude(results, machine, runner.warnings, args.rounds, ran)
        report.show()
        report.write(folder, "benchmarks")
    return int(report.has_failed)


if __name__ == "__main__":
    sys.exit(main())
