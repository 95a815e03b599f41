"""How long does the MNIST job train until it is as good as this? Over many seeds, from the end of the first step.

    python -m benchmarks.to_target --data-dir ../shared/data/mnist --seeds 30
    python -m benchmarks.to_target --data-dir ../shared/data/mnist -- --compile reduce-overhead

What stands behind -- are options of the job, beside or instead of those that RECIPE has.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median, pstdev
from typing import NamedTuple

from benchmarks import NO_GPUS
from hvd_trainer.config.figures import StopCondition
from hvd_trainer.measure.report import Table
from hvd_trainer.measure.start import Start, run_to_end

RECIPE = (
    # Batches of which an epoch has a whole number: another size would be compiled inside the time.
    *("--model", "quick", "--backend", "single", "--epochs", "2", "--batch-size", "250"),
    *("--optimizer", "adamw", "--lr", "0.01", "--warmup-epochs", "0.2", "--lr-decay", "linear"),
)


class Outcome(NamedTuple):
    """Of one run."""

    seconds: float
    """of training, evaluation left out, after the first step"""
    first_step_s: float
    """how long that took: it reads libraries, and compiles most, where that is wanted"""
    epochs: int
    steps: int
    figure: float
    """that was aimed at, at the end"""
    reached: bool


def command_for(until: str, seed: int, data_dir: Path, log: Path, options: Sequence[str]) -> list[str]:
    """One run of the job."""
    wanted = ["--until", until, "--seed", str(seed), "--dataset", "mnist", "--data-dir", str(data_dir)]
    kept = ["--log-dir", str(log), "--save-every-epochs", "None"]
    return [sys.executable, "-m", "hvd_trainer.mnist", *RECIPE, *wanted, *kept, *options]


def outcome_of(log: Path, until: str) -> Outcome:
    """What the log of a run that has ended says.

    Raises:
        OSError, ValueError, KeyError: it has not.
    """
    lines = [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]
    epochs = [line for line in lines if line["event"] == "epoch"]
    end = next(line for line in lines if line["event"] == "end")
    condition = StopCondition.parse(until)
    figure = float(end[condition.figure])
    return Outcome(
        sum(line["seconds"] for line in epochs) - end["first_step_s"],
        end["first_step_s"],
        len(epochs),
        end["step"],
        figure,
        condition.is_reached({condition.figure: figure}),
    )


def report(until: str, outcomes: Sequence[Outcome]) -> str:
    """A table; the spread is the standard deviation over the seeds."""
    rows = {
        "seconds after the first step": [its.seconds for its in outcomes],
        "first step, s": [its.first_step_s for its in outcomes],
        "epochs": [its.epochs for its in outcomes],
        "steps": [its.steps for its in outcomes],
        StopCondition.parse(until).figure: [its.figure for its in outcomes],
    }
    figures = (fmean, median, min, max, pstdev)
    columns = ("", "mean", "median", "lowest", "highest", "spread")
    table = Table("", columns, [[name, *(f"{of(its):.4g}" for of in figures)] for name, its in rows.items()])
    reached = sum(its.reached for its in outcomes)
    return "\n".join([table.markdown(), "", f"{reached} of {len(outcomes)} seeds reached {until}."])


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.to_target",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data-dir", type=Path, required=True, help="MNIST's folder")
    parser.add_argument("--until", default="val_accuracy>=0.99", help="as the job's option")
    parser.add_argument("--seeds", type=int, default=30)
    parser.add_argument("--limit-s", type=float, default=600.0, help="for one run")
    parser.add_argument("--gpus", action="store_true", help="train on a GPU, not on the CPU")
    parser.add_argument("options", nargs="*", help="of the job, behind --")
    args = parser.parse_args()
    if args.seeds < 1:
        parser.error(f"--seeds {args.seeds}: at least 1 is needed")
    outcomes = []
    for seed in range(args.seeds):
        with tempfile.TemporaryDirectory(prefix="hvd-to-target-") as folder:
            log, output = Path(folder) / "log", Path(folder) / "output"
            command = command_for(args.until, seed, args.data_dir.resolve(), log, args.options)
            hidden = {} if args.gpus else NO_GPUS
            exit_code = run_to_end(Start(command, hidden), Path(folder), output, limit_s=args.limit_s)
            try:
                its = outcome_of(log, args.until)
            except (OSError, ValueError, KeyError, StopIteration):
                said = output.read_text(errors="replace")[-2000:]
                print(f"seed {seed}: FAILED, exit code {exit_code}: {said}", file=sys.stderr)
                return 1
        print(f"seed {seed}: {its}", file=sys.stderr, flush=True)
        outcomes.append(its)
    print(report(args.until, outcomes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
