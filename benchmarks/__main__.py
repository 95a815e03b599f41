"""Measure training speed side by side, in interleaved rounds; prints one table.

python -m benchmarks --data-dir ../shared/data/mnist --ranks 2,4 --rounds 5
python -m benchmarks --only "*DDP*" "*ddp*" "*floor*" --ranks 2 --rounds 3
"""

from __future__ import annotations

import argparse
import json
import sys
from fnmatch import fnmatchcase
from pathlib import Path

from torchvision import datasets

from benchmarks.contestants import CONTESTANTS, IMAGES, JOBS, MNIST, SCRIPTS, TOKENS, Contestant
from benchmarks.raw import files
from benchmarks.results import Series, as_json, describe_machine, markdown, summarise
from benchmarks.run import RunError, run
from hvd_trainer.measure.trials import in_rounds


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
    parser.add_argument("--output", type=Path, metavar="PREFIX", help="write PREFIX.json and PREFIX.md")
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
        if contestant.job in [JOBS[job] for job in jobs]
        and any(fnmatchcase(contestant.name, pattern) for pattern in patterns)
    ]


def measure(args: argparse.Namespace) -> list[Series]:
    """All contestants in each round, forwards in one and backwards in the next (A B C C B A)."""
    series = [Series(contestant, ranks) for ranks in args.ranks for contestant in args.contestants]
    for number, one in in_rounds(series, args.rounds):
        label = f"round {number}/{args.rounds}, {one.ranks} ranks, {one.contestant.name}"
        result = None
        try:
            result = run(one.contestant, one.ranks, args.data_dir, limit_s=args.limit_s)
            said = f"{result.images_per_s:,.0f} samples/s, first step after {result.startup_s:.1f} s"
        except RunError as error:
            said = f"FAILED: {error}"
        print(f"{label}: {said}", file=sys.stderr, flush=True)
        one.rounds.append(result)
    return series


def main() -> int:
    args = parse_args()
    if args.list:
        for contestant in args.contestants:
            missing = "" if contestant.is_here else f", needs {contestant.needs}, which is not installed"
            print(f"{contestant.job.name}: {contestant.name} ({contestant.launcher}{missing})")
        return 0
    for contestant in args.contestants:
        if not contestant.is_here:
            print(f"{contestant.name} is left out: {contestant.needs} is not installed", file=sys.stderr)
    args.contestants = [contestant for contestant in args.contestants if contestant.is_here]
    args.data_dir = args.data_dir.resolve()
    # Once, before anything is timed; nothing is fetched or made if the files are there.
    jobs = {contestant.job for contestant in args.contestants}
    if jobs & {MNIST, SCRIPTS}:
        datasets.MNIST(args.data_dir, download=True)
    for kind in [kind for kind, job in (("images", IMAGES), ("tokens", TOKENS)) if job in jobs]:
        files.make(args.data_dir, kind)
    machine = describe_machine()
    series = measure(args)
    rows = summarise(series)
    table = markdown(rows, machine)
    print(table, end="")
    if args.output is not None:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.with_name(f"{args.output.name}.md").write_text(table)
        report = json.dumps(as_json(series, rows, machine), indent=1)
        args.output.with_name(f"{args.output.name}.json").write_text(report)
    return 1 if any(None in one.rounds for one in series) else 0


if __name__ == "__main__":
    sys.exit(main())
