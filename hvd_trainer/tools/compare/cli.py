"""`python -m hvd_trainer compare`: which engine is faster here, for this job, and what makes the difference.

python -m hvd_trainer compare --np 1,2,4 -- -m hvd_trainer.mnist --epochs 1

Every engine on every number of ranks is started as a job of its own by its own launcher, in rounds: A B, then B A.
A run that has ended is written down at once, so that the same command goes on where a stopped one was.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated

import tyro
from annotated_types import Ge, Gt

from hvd_trainer.config.checks import check_ranges
from hvd_trainer.errors import OptionError
from hvd_trainer.tools.compare.equal_work import Side, refuse_unequal
from hvd_trainer.tools.compare.report import show
from hvd_trainer.tools.compare.result import Comparison
from hvd_trainer.tools.compare.trials import Point, entries, in_rounds, points
from hvd_trainer.tools.runner.command import command_for, read_job
from hvd_trainer.tools.runner.formats import check_installed, number
from hvd_trainer.tools.runner.machine import busy, describe_machine, num_gpus
from hvd_trainer.tools.runner.runs import Run, append_run, locked_folder, log_dir, read_runs, run_once, split
from hvd_trainer.tools.runner.step_stats import are_figures, read_figures, read_probed
from hvd_trainer.utils.text import COMMAND, plural


@dataclass(frozen=True)
class Options:
    """Measure a job on both engines, in rounds, and say which one is faster, by how much and why.

    The job stands behind --, as it would stand behind `python`. With --global-batch-size among its options the
    global batch is the same on any number of ranks (strong scaling); else each rank's batch is (weak scaling).
    """

    np: Annotated[str, tyro.conf.arg(metavar="N,N,...")] = "1,2"
    """numbers of ranks"""
    engines: Annotated[str, tyro.conf.arg(metavar="NAME,NAME")] = "horovod,ddp"
    """who takes part: horovod, ddp, single (one process without an engine), and where there are two GPUs or more
    data-parallel (torch.nn.DataParallel)"""
    baseline: Annotated[
        tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="'ENGINE SCRIPT ...'")
    ] = ()
    """a script of your own to compare with, which need not use this package, such as 'ddp plain.py --epochs 1';
    ENGINE says what starts it: ddp (torchrun) or horovod (horovodrun). May be given again and again"""
    rounds: Annotated[int, Ge(0)] = 5
    """how often everything is run; 0: only show what there is"""
    warmup_steps: Annotated[int, Ge(0)] = 10
    """optimizer steps at the beginning of each run that do not count"""
    threads: Annotated[int | None, Ge(1)] = None
    """CPU threads of each rank; None: this machine's cores by the largest number of ranks"""
    out: Path = Path("runs/compare")
    """folder for the page, the tables and the runs; the same command again goes on with what is there"""
    timeout_s: Annotated[float, Gt(0)] = 1800.0
    """after so many seconds a run is killed"""

    @property
    def numbers(self) -> list[int]:
        """The numbers of ranks, the smallest first.

        Raises:
            OptionError: they are no such list.
        """
        words = [word.strip() for word in self.np.split(",")]
        if not all(word.isdecimal() and int(word) > 0 for word in words):
            raise OptionError(
                f"--np {self.np}: type numbers of ranks with commas between them, such as --np 1,2,4"
            )
        return sorted({int(word) for word in words})


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0 if all was measured, 1 if a run failed, 130 after Ctrl-C.

    Raises:
        OptionError: an option is out of its range; the runs have not done the same work.
    """
    own, words = split(argv)
    options = tyro.cli(Options, prog=f"{COMMAND} compare", args=own)
    check_ranges(options)
    check_installed()
    job, numbers = read_job(words), options.numbers
    threads = options.threads or max(1, len(os.sched_getaffinity(0)) // max(numbers))
    machine = describe_machine()
    setting = {"warmup_steps": options.warmup_steps, **{k: machine[k] for k in ("python", "torch", "horovod")}}
    engines = [name.strip() for name in options.engines.split(",")]
    everyone = entries(job, engines, options.baseline, most=max(numbers), gpus=num_gpus())
    plan = points(everyone, numbers, threads, setting)
    strong = any(word.startswith("--global-batch-size") for word in job)
    folder = options.out.expanduser().resolve()
    interrupted = False
    with locked_folder(folder):
        try:
            measure(plan, folder, options, strong=strong)
        except KeyboardInterrupt:
            interrupted = True
        comparison = Comparison.of(plan, read_runs(folder, are_figures), job=job, strong=strong, machine=machine)
        comparison.check_work()
        if any(one.runs for one in comparison.measured):
            show(comparison, folder)
        else:
            print("No run came to its end: there is nothing to show.", file=sys.stderr)
    if interrupted:
        print("interrupted: the same command goes on from here", file=sys.stderr)
        return 130
    return int(any(not one.done for one in comparison.measured))


def measure(plan: Sequence[Point], folder: Path, options: Options, *, strong: bool) -> None:
    """Runs what has not been run yet, and writes down each run as it ends.

    Raises:
        OptionError: two runs have not done the same work, or one has no steps that count.
    """
    ended = read_runs(folder, are_figures)
    done = {(run.key, run.round): run for run in ended if run.state == "done"}
    order = list(in_rounds(plan, options.rounds))
    to_do = [(number, point) for number, point in order if (point.key, number) not in done]
    print(
        f"{plural(len(plan), 'point')} ({', '.join(point.label for point in plan)}), "
        f"{plural(len(order), 'run')} in {plural(options.rounds, 'round')}, {len(to_do)} to do; all is kept in "
        f"{folder}",
        flush=True,
    )
    if to_do and (warning := busy()) is not None:
        print(f"warning: {warning}", file=sys.stderr)
    clock = Clock(run for run in ended if run.state == "done")
    sides = [side_of(point, run) for run in done.values() for point in plan if point.key == run.key]
    given_up: set[str] = set()
    for count, (number_, point) in enumerate(to_do, 1):
        if point.key in given_up:
            continue
        run = start(point, number_, folder, options)
        check_steps(point, run, options.warmup_steps)
        append_run(folder, run)
        clock.note(run)
        left = clock.left([its for _, its in to_do[count:] if its.key not in given_up])
        print(f"{count}/{len(to_do)}  round {number_}, {point.label}: {result_of(run)}{left}", flush=True)
        if run.state != "done":
            given_up.add(point.key)
            continue
        side = side_of(point, run)
        for other in sides:
            refuse_unequal(other, side, strong)
        sides.append(side)


class Clock:
    """How long is left, from how long the runs took so far."""

    def __init__(self, runs: Iterable[Run]) -> None:
        self._seconds: dict[str, list[float]] = {}
        for run in runs:
            self.note(run)

    def note(self, run: Run) -> None:
        self._seconds.setdefault(run.key, []).append(run.seconds)

    def left(self, to_come: Sequence[Point]) -> str:
        """`, about 3 min left`."""
        if not to_come:
            return ""
        usual = median(second for its in self._seconds.values() for second in its)
        seconds = sum(median(self._seconds.get(point.key, [usual])) for point in to_come)
        return f", about {seconds / 60:.0f} min left" if seconds >= 90 else f", about {seconds:.0f} s left"


def side_of(point: Point, run: Run) -> Side:
    return Side(point.contestant.name, point.ranks, run.figures["work"])


def start(point: Point, number_: int, folder: Path, options: Options) -> Run:
    """One run of one point, from its start to its end."""
    job = point.contestant.arguments(log_dir(folder))
    read = read_figures if point.contestant.is_ours else read_probed
    return run_once(
        [*only_gpus(point), *command_for(point.contestant.launcher, point.ranks, job)],
        folder,
        point.identity,
        number_,
        threads=point.threads,
        limit_s=options.timeout_s,
        read=partial(read, ranks=point.processes, warmup_steps=options.warmup_steps),
    )


def only_gpus(point: Point) -> list[str]:
    """What DataParallel, which takes all that it sees, must not see more of than there are ranks beside it."""
    if point.contestant.engine != "data-parallel":
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(point.ranks)))).split(",")
    return ["env", f"CUDA_VISIBLE_DEVICES={','.join(visible[: point.ranks])}"]


def check_steps(point: Point, run: Run, warmup_steps: int) -> None:
    """A run that has ended must have steps that count.

    Raises:
        OptionError: all of them belong to the warm-up.
    """
    if run.state == "done" and "step_s" not in run.figures:
        raise OptionError(
            f"{point.label} makes {plural(run.figures['work']['steps'], 'step')}, and the first {warmup_steps} do "
            f"not count: give the job more --epochs, or type a lower --warmup-steps"
        )


def result_of(run: Run) -> str:
    """`14,210 samples/s (12 s)`; a script that is not ours does not tell its samples."""
    if run.state != "done":
        return f"{run.state}: {run.note}"
    rate = run.figures.get("samples_per_s")
    speed = f"{number(1 / run.figures['step_s'])} steps/s" if rate is None else f"{number(rate)} samples/s"
    return f"{speed} ({run.seconds:.0f} s)"
