"""Does a step cost more where there is more of everything? Ranks, tensors of parameters, samples: one at a time.

    python -m benchmarks.growth --rounds 3

The Trainer beside the same training by hand, on both engines, interleaved. The step has hardly any arithmetic: the
ranks train a linear layer on samples in memory; the tensors are of eight numbers each, and the samples in a file.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np

from benchmarks import NO_GPUS
from benchmarks.run import python_path
from hvd_trainer.measure.figures import read_steps
from hvd_trainer.measure.measured import MeasuredTrial
from hvd_trainer.measure.start import run_to_end
from hvd_trainer.measure.trials import in_rounds

SIZES = {
    "ranks": (1, 2, 4, 8),
    "tensors": (10, 100, 1_000, 10_000),
    "samples": (10, 10**4, 10**5, 10**6, 10**7, 10**8),
}
USUAL = {"ranks": 2, "tensors": 20, "samples": 10**5}
WARM_UP = 10
LOOPS = ("trainer", "hand")


class Case(NamedTuple):
    """One training."""

    what: str
    """that grows"""
    ranks: int
    tensors: int
    samples: int
    backend: str
    loop: str

    @property
    def size(self) -> int:
        """Of what grows."""
        sizes: dict[str, int] = self._asdict()
        return sizes[self.what]


class Figures(NamedTuple):
    """Of one run, the mean of its ranks."""

    step_ms: float
    first_step_s: float
    """from the start of the launcher"""
    peak_mb: float


def cases(wanted: list[str]) -> Iterator[Case]:
    """All of them; those that are compared stand beside each other."""
    for what in wanted:
        for size in SIZES[what]:
            grown = USUAL | {what: size}
            for backend in ("ddp", "horovod") if grown["ranks"] > 1 else ("single", "ddp", "horovod"):
                for loop in LOOPS:
                    yield Case(what, **grown, backend=backend, loop=loop)


def run(case: Case, folder: Path, limit_s: float) -> Figures | None:
    """Starts one training; None if it failed."""
    many: tuple[str, ...] = ()
    if case.what != "ranks":  # They train a linear layer on samples in memory.
        data = folder / f"{case.samples}.bin"
        if not data.exists():
            with data.open("wb") as file:  # of holes, which take no room
                file.truncate(4 * case.samples)
        many = ("--tensors", str(case.tensors), "--data", str(data))
    steps = 30 if case.tensors > 1_000 else 200
    with tempfile.TemporaryDirectory(dir=folder) as log:
        job = [
            *("-m", "benchmarks.ours.growing"),
            *("--loop", case.loop, "--backend", case.backend, "--samples", str(case.samples)),
            *("--steps", str(steps), *many),
        ]
        start = MeasuredTrial(job=job, engine=case.backend, ranks=case.ranks, threads=1, native=True).start(
            Path(log)
        )
        began = time.time()
        start = start._replace(variables={**NO_GPUS, **python_path(), **start.variables})
        output = Path(log) / "output"
        run_to_end(start, Path(log), output, limit_s=limit_s)
        ranks = read_steps(Path(log))
        if len(ranks) != case.ranks or any(len(rank["step"]) != steps for rank in ranks):
            print(output.read_text(errors="replace")[-2000:], file=sys.stderr)
            return None
        seconds = np.stack([rank["seconds"] for rank in ranks]).sum(axis=2).mean(axis=0)
        return Figures(
            1000 * float(np.median(seconds[WARM_UP:])),
            max(float(rank["first_step_at"]) for rank in ranks) - began,
            max(json.loads(str(rank["results"]))["peak_memory_mb"] for rank in ranks),
        )


def table(measured: Mapping[Case, Sequence[Figures | None]]) -> str:
    """Medians over the rounds that have both loops; the overhead is the median of the rounds' differences."""
    lines = [
        "| | engine | step by hand, ms | by the Trainer, ms | overhead, ms | first step after, s | peak, MB |",
        "|---|---|---|---|---|---|---|",
    ]
    for case, ours in measured.items():
        if case.loop != "trainer":
            continue
        rounds = zip(measured[case._replace(loop="hand")], ours, strict=True)
        pairs = [(hand, trainer) for hand, trainer in rounds if hand is not None and trainer is not None]
        what = f"{case.size:,} {case.what if case.size > 1 else case.what.removesuffix('s')}"
        if not pairs:
            lines.append(f"| {what} | {case.backend} | failed | | | | |")
            continue
        overhead = median(trainer.step_ms - hand.step_ms for hand, trainer in pairs)
        both = [Figures(*map(median, zip(*its, strict=True))) for its in zip(*pairs, strict=True)]
        lines.append(
            f"| {what} | {case.backend} | {both[0].step_ms:.3f} | {both[1].step_ms:.3f} | "
            f"{overhead:+.3f} | {both[0].first_step_s:.1f}, {both[1].first_step_s:.1f} | {both[0].peak_mb:,.0f}, "
            f"{both[1].peak_mb:,.0f} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.growth",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--what", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit-s", type=float, default=300.0, help="for one run")
    args = parser.parse_args()
    everything = list(cases(args.what))
    measured: dict[Case, list[Figures | None]] = {case: [] for case in everything}
    with tempfile.TemporaryDirectory(prefix="hvd-growth-") as folder:
        for number, case in in_rounds(everything, args.rounds):
            figures = run(case, Path(folder), args.limit_s)
            print(f"round {number}/{args.rounds}, {case}: {figures}", file=sys.stderr, flush=True)
            measured[case].append(figures)
    print(table(measured))
    return int(any(None in its for its in measured.values()))


if __name__ == "__main__":
    sys.exit(main())
