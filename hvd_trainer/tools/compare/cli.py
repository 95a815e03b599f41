"""`python -m hvd_trainer compare`: how fast a job is on each engine, and with which of its options.

python -m hvd_trainer compare --np 1,2,4 -- -m hvd_trainer.mnist --epochs 1
python -m hvd_trainer compare --backend ddp --vary chunks=1,2,4 --vary stages=1,2 --steps 20 -- -m hvd_trainer.imdb
python -m hvd_trainer compare --search --np 2 -- -m hvd_trainer.mnist

Each trial is started as a job of its own by its engine's own launcher, in rounds: A B, then B A. A run that has
ended is written down at once, so that the same command goes on where a stopped one was.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from annotated_types import Ge, Gt

from hvd_trainer.errors import OptionError
from hvd_trainer.measure.formats import check_installed
from hvd_trainer.tools.compare import report, search_report
from hvd_trainer.tools.compare.result import Comparison, side_of
from hvd_trainer.tools.compare.settings_runner import SearchJob, search_all
from hvd_trainer.tools.compare.trials import CompareTrial, make_trials, read_backends, read_entries
from hvd_trainer.tools.compare.variants import Axis, make_variants, read_axes
from hvd_trainer.tools.runner.command import read_command
from hvd_trainer.tools.runner.equal_work import Side, refuse_unequal
from hvd_trainer.tools.runner.folder import locked_folder
from hvd_trainer.tools.runner.job_kind import is_trainer_job
from hvd_trainer.tools.runner.machine import busy_warning, conditions, describe_machine, threads_per_rank
from hvd_trainer.tools.runner.measured import describe_speed
from hvd_trainer.tools.runner.records import read_runs
from hvd_trainer.tools.runner.step_stats import are_figures
from hvd_trainer.tools.runner.trial_runner import TrialRunner
from hvd_trainer.utils import accelerator
from hvd_trainer.utils.text import plural

MAX_NAMED = 6
"""Trials that are named before they are run."""
NOT_SEARCHED = ("vary", "baseline", "steps", "threads", "retry_failed")
SEARCH_ONLY = ("run_s", "least_gain", "lossy")
"""Options that do not go together with --search, and those that need it."""
SEARCHED_BACKENDS, MIN_SEARCH_ROUNDS = ("horovod", "ddp"), 3


@dataclass(frozen=True)
class CompareOptions:
    """Measure a job on both engines and with several values of its options, in rounds; say what is faster and why.

    The job stands behind --, as it would stand behind `python`. With --search the fastest settings of each engine
    are searched, and written as YAML for the job's --config; for a script that is not built on the Trainer these
    are options of `run`. What the job is typed with stays as it is.

    Example: compare --backend ddp --np 1,2,4 --vary chunks=1,2,4 --vary batch-size=32,64 --steps 20
    -- -m hvd_trainer.imdb --dataset synthetic --stages 2
    """

    np: Annotated[str | None, tyro.conf.arg(metavar="N,N,...")] = None
    """numbers of ranks; None: 1,2, and with --search 2"""
    backend: Annotated[str, tyro.conf.arg(metavar="NAME,NAME")] = "horovod,ddp"
    """who takes part: horovod, ddp, single (one process without an engine), and where there are two GPUs or more
    data-parallel (torch.nn.DataParallel)"""
    vary: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="OPTION=V,V,...")] = ()
    """an option of the job and the values that it takes, such as chunks=1,2,4 or compile=true,false. May be given
    again and again: all combinations are run, with heat maps"""
    baseline: Annotated[
        tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="'ENGINE SCRIPT ...'")
    ] = ()
    """a script of your own to compare with, which need not use this package, such as 'ddp plain.py --epochs 1';
    ENGINE says what starts it: ddp (torchrun) or horovod (horovodrun). May be given again and again"""
    search: bool = False
    """search the fastest settings of each engine for the job"""
    rounds: Annotated[int, Ge(0)] = 5
    """how often everything is run; 0: only show what there is. With --search: how often a setting is run at most,
    and how often the result is run to confirm it"""
    steps: Annotated[int | None, Ge(1)] = None
    """optimizer steps of each run that count, whatever its --epochs; None: as many as the job makes"""
    warmup_steps: Annotated[int, Ge(0)] = 10
    """optimizer steps at the beginning of each run that do not count"""
    threads: Annotated[int | None, Ge(1)] = None
    """CPU threads of each rank; None: this machine's cores by the largest number of ranks"""
    run_s: Annotated[float, Gt(0)] = 4.0
    """with --search: seconds that each run trains, about; starting it takes longer"""
    least_gain: Annotated[float, Ge(0)] = 0.02
    """with --search: gains below this are not searched for, as a fraction"""
    lossy: bool = False
    """with --search: also adopt what rounds the gradients: --compression"""
    out: Path = Path("runs/compare")
    """folder for the page, the tables and the runs; the same command again goes on with what is there"""
    timeout_s: Annotated[float, Gt(0)] = 1800.0
    """after so many seconds a run is killed; it is tried again when the same command is typed again"""
    retry_failed: bool = False
    """start again what has failed in this folder, too"""


def main(argv: Sequence[str]) -> int:
    """Run the command.

    Returns:
        The exit code: 0 if all that is possible was measured, 1 if a run failed, 130 after Ctrl-C.

    Raises:
        OptionError: an option is out of its range, or unknown to the job; the runs have not done the same work.
    """
    options, job = read_command("compare", CompareOptions, argv)
    _check_together(options)
    check_installed()
    typed = argv[: argv.index("--")]
    return _search(options, job, typed) if options.search else _compare(options, job, typed)


def _check_together(options: CompareOptions) -> None:
    """Check that the options go together.

    Raises:
        OptionError: they do not.
    """
    default = CompareOptions()
    refused = NOT_SEARCHED if options.search else SEARCH_ONLY
    for name in refused:
        if getattr(options, name) != getattr(default, name):
            option = f"--{name.replace('_', '-')}"
            raise OptionError(
                f"{option} does not go with --search: leave one out"
                if options.search
                else f"{option} is for --search: add it, or leave {option} out"
            )
    if options.search and options.rounds < MIN_SEARCH_ROUNDS:
        raise OptionError(f"--search needs --rounds {MIN_SEARCH_ROUNDS} or more, not {options.rounds}")
    if options.vary and options.baseline:
        raise OptionError("--vary changes options of the job, which a --baseline has not: leave one out")


def _compare(options: CompareOptions, job: tuple[str, ...], typed: Sequence[str]) -> int:
    """Run all trials, show the results, and return the exit code."""
    if not is_trainer_job(job) and "data-parallel" in options.backend:
        raise OptionError(
            "--backend data-parallel takes a job that is built on the Trainer. Leave it out: --backend horovod,ddp"
        )
    axes, machine = read_axes(options.vary), describe_machine()
    trials = plan_trials(job, axes, options, machine)
    interrupted = False
    with locked_folder(options.out) as folder:
        try:
            measure(trials, folder, options)
        except KeyboardInterrupt:
            interrupted = True
            print("interrupted: the same command goes on from here", file=sys.stderr)
        runs = read_runs(folder, are_figures)
        comparison = Comparison.of(trials, runs, job=job, machine=machine, varied=axes, options=typed)
        if axes or any(result.state != "not run" for result in comparison.results):
            report.write(comparison, folder)
        else:
            print("No run has come to its end: there is nothing to show.", file=sys.stderr)
    return 130 if interrupted else int(not all(result.is_complete for result in comparison.results))


def _search(options: CompareOptions, job: tuple[str, ...], typed: Sequence[str]) -> int:
    """Search the fastest settings on each engine, show them, and return the exit code."""
    numbers = read_ranks(options.np or "2")
    if len(numbers) > 1:
        raise OptionError(f"--np {options.np}: --search takes one number of ranks, such as --np {numbers[-1]}")
    backends = read_backends(options.backend, SEARCHED_BACKENDS)
    search_job, machine = SearchJob.read(job, numbers[0]), describe_machine()
    with locked_folder(options.out) as folder:
        try:
            results, warned = search_all(
                search_job,
                backends,
                folder,
                conditions(machine),
                rounds=options.rounds,
                warmup_steps=options.warmup_steps,
                run_s=options.run_s,
                least_gain=options.least_gain,
                lossy=options.lossy,
                timeout_s=options.timeout_s,
            )
        except KeyboardInterrupt:
            print("interrupted: the same command goes on from here", file=sys.stderr)
            return 130
        search_report.write(results, search_job, folder, machine=machine, warnings=warned, typed=typed)
    return 0


def read_ranks(text: str) -> list[int]:
    """Return the numbers of ranks of `--np 1,2,4`, in order.

    Raises:
        OptionError: one is no number above 0.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise OptionError(f"--np {text}: type numbers of ranks with commas between them, such as --np 1,2,4")
    return sorted({int(word) for word in words})


def plan_trials(
    job: Sequence[str], axes: Sequence[Axis], options: CompareOptions, machine: Mapping[str, Any]
) -> list[CompareTrial]:
    """Return what is to be run, in the order of the tables.

    Raises:
        OptionError: an option is not what it should be, or unknown to the job.
    """
    numbers = read_ranks(options.np or "1,2")
    num_gpus = accelerator.count(accelerator.kind())
    return make_trials(
        read_entries(options.backend, options.baseline, max_ranks=max(numbers), num_gpus=num_gpus),
        numbers,
        make_variants(job, axes),
        threads=options.threads or threads_per_rank(max(numbers)),
        conditions={"warmup_steps": options.warmup_steps, **conditions(machine)},
        steps=None if options.steps is None else options.warmup_steps + options.steps,
    )


def measure(trials: Sequence[CompareTrial], folder: Path, options: CompareOptions) -> None:
    """Run what has not been run yet, and write down each run as it ends.

    Raises:
        OptionError: two runs have not done the same work, or one has no steps that count.
    """
    runner = TrialRunner(folder, limit_s=options.timeout_s, are_figures=are_figures)
    possible = [trial for trial in trials if trial.reason is None]
    # What failed will fail again, and take as long to do so.
    to_do = runner.to_do(possible, options.rounds, retry_failed=options.retry_failed)
    planned = f"{plural(len(possible) * options.rounds, 'run')} in {plural(options.rounds, 'round')}"
    print(f"{_listed(trials)}, {planned}, {len(to_do)} to do; all is kept in {folder}", flush=True)
    if count := 0 if options.retry_failed else sum(map(runner.has_failed, possible)):
        print(f"{plural(count, 'trial')} failed before: --retry-failed starts them again", flush=True)
    if to_do and (text := busy_warning()):
        runner.warn(text)
    by_key = {trial.key: trial for trial in trials}
    known = [(by_key[run.key], run) for run in runner.last.values() if run.key in by_key]
    sides: list[Side] = []
    for trial, run in itertools.chain(known, runner.run_all(to_do, describe=describe_speed)):
        if run.state == "done":
            sides.append(side_of(trial, run))
            for other in sides:
                refuse_unequal(other, sides[-1])


def _listed(trials: Sequence[CompareTrial]) -> str:
    """Return `2 trials (horovod x 2, ddp x 2)`, or how many of them are impossible."""
    text = plural(len(trials), "trial")
    if len(trials) <= MAX_NAMED:
        text += f" ({'; '.join(trial.label for trial in trials)})"
    impossible = sum(trial.reason is not None for trial in trials)
    return f"{text}, {impossible} of them impossible" if impossible else text
