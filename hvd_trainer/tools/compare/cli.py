"""`python -m hvd_trainer compare`: how fast a job is on each engine, and with which of its options.

python -m hvd_trainer compare --np 1,2,4 -- -m hvd_trainer.mnist --epochs 1
python -m hvd_trainer compare --backend ddp --vary chunks=1,2,4 --vary stages=1,2 --steps 20 -- -m hvd_trainer.imdb
python -m hvd_trainer compare --np 2 --vary threads=1,2 --vary bucket-mb=1,25 -- -m hvd_trainer.mnist

Each trial is started as a job of its own by its engine's own launcher, in rounds: A B, then B A. A run that has
ended is written down at once, so that the same command continues where a stopped one was.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections import defaultdict
from collections.abc import Sequence

from hvd_trainer.errors import OptionError
from hvd_trainer.measure.command import read_command
from hvd_trainer.measure.equal_work import refuse_unequal
from hvd_trainer.measure.figures import are_figures
from hvd_trainer.measure.formats import check_installed
from hvd_trainer.measure.machine import Ran, busy_warning, conditions, describe_machine
from hvd_trainer.measure.measured import describe_speed
from hvd_trainer.measure.tool_folder import locked_folder
from hvd_trainer.measure.trials import RunRecord, TrialRunner, read_runs
from hvd_trainer.tools.compare import report
from hvd_trainer.tools.compare.choice import write_settings
from hvd_trainer.tools.compare.options import CompareOptions, check_together
from hvd_trainer.tools.compare.plan import CompareTrial, plan, read_axes
from hvd_trainer.tools.compare.result import Comparison
from hvd_trainer.utils.text import COMMAND, plural

MAX_NAMED = 6
"""Trials that are named before they are run."""


def main(argv: Sequence[str]) -> int:
    """Run the command.

    Returns:
        The exit code: 0 if all that is possible was measured, 1 if a run failed, 130 after Ctrl-C.

    Raises:
        OptionError: an option is out of its range, or unknown to the job; the runs have not done the same work.
    """
    ran = Ran.now(f"{COMMAND} compare", argv)
    options, job = read_command("compare", CompareOptions, argv)
    check_together(options)
    check_installed()
    typed = ["--np" if word == "-np" else word for word in argv[: argv.index("--")]]
    axes, machine = read_axes(options.vary, job), describe_machine()
    trials = plan(job, axes, options, conditions(machine))
    interrupted = False
    with locked_folder(options.out, "compare") as folder:
        runner = TrialRunner(folder, limit_s=options.timeout_s, are_figures=are_figures)
        try:
            measure(trials, runner, options)
        except KeyboardInterrupt:
            interrupted = True
            print("interrupted: the same command continues from here", file=sys.stderr)
        runs = read_runs(folder, are_figures)
        known = {"job": job, "machine": machine, "varied": axes, "options": typed, "ran": ran}
        comparison = Comparison.of(trials, runs, **known, least=options.least)
        if axes or any(result.state != "not run" for result in comparison.results):
            made = report.conclude(comparison)
            made.show(runner.warnings)
            made.write(folder, "comparison", write_settings(comparison, folder))
        else:
            print("No run has come to its end: there is nothing to show.", file=sys.stderr)
    return 130 if interrupted else int(not all(result.is_complete for result in comparison.results))


def measure(trials: Sequence[CompareTrial], runner: TrialRunner, options: CompareOptions) -> None:
    """Run what has not been run yet, and write down each run as it ends.

    Raises:
        OptionError: two runs have not done the same work, one has no steps that count, or the job does not know
            an option that varies.
    """
    # What failed will fail again, and take as long to do so.
    to_do = runner.to_do(trials, options.rounds, retry_failed=options.retry_failed)
    planned = f"{plural(len(trials) * options.rounds, 'run')} in {plural(options.rounds, 'round')}"
    labels = f" ({'; '.join(trial.label for trial in trials)})" if len(trials) <= MAX_NAMED else ""
    print(
        f"{plural(len(trials), 'trial')}{labels}, {planned}, {len(to_do)} to do; all is kept in {runner.folder}",
        flush=True,
    )
    if count := 0 if options.retry_failed else sum(map(runner.has_failed, trials)):
        print(f"{plural(count, 'trial')} failed before: --retry-failed starts them again", flush=True)
    if to_do and (text := busy_warning()):
        runner.warn(text)
    by_key = {trial.key: trial for trial in trials}
    known = [(by_key[run.key], run) for run in runner.last.values() if run.key in by_key]
    done = defaultdict[str, list[RunRecord]](list)
    for trial, run in itertools.chain(known, runner.run_all(to_do, describe=describe_speed)):
        if run.state == "done":
            for other in done[trial.variant]:  # the work of other variants is another on purpose
                refuse_unequal(other, run)
            done[trial.variant].append(run)
        for option, _ in trial.settings if run.state == "failed" else ():
            # In the words of argparse and of tyro: each other run would fail as this one.
            if re.search(rf"unrecognized (arguments|options): .*{re.escape(option)}\b", run.note, re.IGNORECASE):
                raise OptionError(
                    f"--vary {option.lstrip('-')}: the job has no such option ({run.why(runner.folder)})"
                )
