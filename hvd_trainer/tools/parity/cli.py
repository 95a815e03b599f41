"""Run `python -m hvd_trainer parity`: train a job on each engine, and compare the traces of its first steps.

The job is started by the engine's own launcher, as `run` starts it; it writes a trace (`measure/trace_format.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from hvd_trainer.measure.command import read_command
from hvd_trainer.measure.formats import check_installed
from hvd_trainer.measure.machine import Ran, threads_per_rank
from hvd_trainer.measure.tool_folder import locked_folder
from hvd_trainer.measure.trials import TrialRunner
from hvd_trainer.tools.parity.comparison import Pair
from hvd_trainer.tools.parity.options import ParityOptions
from hvd_trainer.tools.parity.report import conclude
from hvd_trainer.tools.parity.traced_runs import Side, parse_engines, trace_all, versions
from hvd_trainer.utils.text import COMMAND, plural


def main(argv: Sequence[str]) -> int:
    """Run the comparison and return the exit code: 0 the same, 1 different, 2 if a run has failed.

    Raises:
        OptionError: an option is out of its range, or there is no job.
    """
    # All runs are new ones, from their first step.
    ran = Ran.now(f"{COMMAND} parity", argv)
    options, job = read_command("parity", ParityOptions, argv)
    check_installed()
    if options.new is None:
        sides = [Side(engine, engine, job) for engine in parse_engines(options.backend)]
    else:
        sides = versions(options.backend, job, options.new)
    threads, steps = options.threads or threads_per_rank(options.np), options.steps
    with locked_folder(options.out, "parity") as folder:
        # Nothing is resumed: the job may have been changed since.
        runner = TrialRunner(folder, limit_s=options.timeout_s, resume=False)
        each = f"{plural(steps, 'step')} of {plural(options.np, 'rank')}"
        names = ", ".join(side.name for side in sides)
        print(
            f"{plural(len(sides), 'run')} of {each} at most: {names}; each takes as long as the job's start and "
            f"these steps, {options.timeout_s:g} s at most (--timeout-s)",
            flush=True,
        )
        runs = trace_all(sides, options.np, threads, steps, runner, exactly=options.exactly_horovod)
        traces = [run.trace for run in runs if run.trace is not None]
        pairs = [Pair.compare(one, other, options.tolerance) for one, other in combinations(traces, 2)]
        report = conclude(runs, pairs, folder, runner.warnings, ran)
        report.show(runner.warnings)
        report.write(folder, "parity")
    if not all(run.done for run in runs):
        return 2
    return int(not all(pair.same for pair in pairs))
