"""Run the job with tracing on each engine, one after the other, as a user would start it."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from hvd_trainer.errors import OptionError
from hvd_trainer.tools.parity.traces import Trace, read_trace
from hvd_trainer.tools.runner.command import LAUNCHER_OF, NOT_SAVED, command_for, option_of, option_values
from hvd_trainer.tools.runner.job_kind import is_trainer_job
from hvd_trainer.tools.runner.measured import Start, measured_start
from hvd_trainer.tools.runner.runs import RUNS, RunRecord
from hvd_trainer.tools.runner.trial_runner import run_once
from hvd_trainer.utils.text import plural

TRACES_FOLDER = "traced"
ENGINES = ("horovod", "ddp", "single")
RESERVED_OPTIONS = ("--trace-steps", "--resume")
"""Options that the comparison sets: the job may not have them, nor those that `read_job` refuses."""


@dataclass(frozen=True)
class TracedRun:
    """A run and its trace; a failed run has the trace of the steps it made."""

    engine: str
    run: RunRecord
    trace: Trace | None

    @property
    def done(self) -> bool:
        return self.run.state == "done"

    def failure_message(self, folder: Path) -> str:
        """Return why the run is not done, and where its output is."""
        return f"{self.engine} {self.run.state}: {self.run.why(folder)}"


def check_traced_job(job: Sequence[str], steps: int) -> int:
    """Return the number of steps of each run: at most the --max-steps of a job that is built on the Trainer.

    Raises:
        OptionError: the job has an option that the comparison sets.
    """
    if not is_trainer_job(job):
        return steps
    taken = [word for word in job if option_of(word) in RESERVED_OPTIONS]
    if taken:
        raise OptionError(
            f"Leave {' and '.join(taken)} out of the job: all runs are new ones, from their first step"
        )
    own = option_values(job, "--max-steps")
    return min([steps, *(int(text) for text in own if text.isdecimal() and int(text) > 0)])


def parse_engines(text: str, job: Sequence[str]) -> list[str]:
    """Parse the list of engines; `single` comes last, as it takes its global batch from the others.

    Raises:
        OptionError: an unknown one, one that comes twice, fewer than two, or `single` for a script.
    """
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in ENGINES:
            raise OptionError(f"--engines {text}: there are {', '.join(ENGINES)}, and not {name!r}")
    if len(names) != len(set(names)) or len(names) < 2:
        raise OptionError(f"--engines {text}: name two or three, each once, such as --engines horovod,ddp,single")
    if "single" in names and not is_trainer_job(job):
        raise OptionError(
            f"--engines {text}: single takes the ranks' batches together by options of the Trainer, on which "
            f"{' '.join(job[:2]) if job[0] == '-m' else job[0]} is not built. Type: --engines horovod,ddp"
        )
    return sorted(names, key=lambda name: name == "single")


@dataclass(frozen=True)
class Plan:
    """The options with which the job is started on each engine."""

    job: tuple[str, ...]
    steps: int
    ranks: int
    threads: int
    """of each rank, on the CPU"""
    limit_s: float

    def start(self, engine: str, log: Path, like: Trace | None = None) -> Start:
        """Return how to run the job on an engine: as a user would type it, but for the steps that are traced.

        Args:
            log: the log folder.
            like: for `single`: a run on many ranks, whose global batch it takes.

        Raises:
            OptionError: the launcher is not installed.
        """
        if not is_trainer_job(self.job):
            steps, script = self.steps, self.job
            return measured_start(script, engine=engine, ranks=self.ranks, log=log, steps=steps, trace_steps=steps)
        words = [*self.job, *NOT_SAVED, "--max-steps", str(self.steps), "--trace-steps", str(self.steps)]
        words += ["--backend", engine, "--log-dir", str(log)]
        if engine == "single" and like is not None:
            words += global_batch_options(like)
        return Start(command_for(LAUNCHER_OF[engine], self.ranks, words), {})


def global_batch_options(like: Trace) -> list[str]:
    """Return options with which one process takes as many samples in a step as the ranks of `like` do together.

    It takes them in further passes, each as large as a rank's batch: so they fit in memory where that does, and
    scaling of the learning rate gives the same rate. Batch norm over the global batch needs one large pass.
    """
    options, size = like.options, like.start["copies"]
    if options["reproducible"] is not None:  # its virtual ranks fix the global batch
        return []
    if options["sync_batch_norm"]:
        return ["--batch-size", str(int(like.facts["batch_size"]) * size)]
    return ["--accumulate", str(int(options["accumulate"]) * size)]


def trace_all(engines: Sequence[str], plan: Plan, folder: Path) -> list[TracedRun]:
    """Run the job on each engine and print each result; after a failed run the others are run all the same."""
    for old in (folder / TRACES_FOLDER, folder / "failed"):
        shutil.rmtree(old, ignore_errors=True)
    (folder / RUNS).unlink(missing_ok=True)
    for engine in engines:
        plan.start(engine, folder)  # raises before the first run if a launcher is missing
    done: list[TracedRun] = []
    for engine in engines:
        like = next((its.trace for its in done if its.trace is not None), None)
        done.append(_trace(engine, plan, folder, like))
        print(_result_line(done[-1], plan), flush=True)
    return done


def _trace(engine: str, plan: Plan, folder: Path, like: Trace | None) -> TracedRun:
    log = folder / TRACES_FOLDER / engine
    ranks = 1 if LAUNCHER_OF[engine] == "python" else plan.ranks
    start = plan.start(engine, log, like)
    identity = {"engine": engine, "ranks": ranks, "words": start.command[1:]}
    run = run_once(
        start.command,
        folder,
        identity,
        1,
        threads=plan.threads,
        limit_s=plan.limit_s,
        read=partial(_figures, log, ranks),
        variables=start.variables,
    )
    if run.state == "failed" and run.note.startswith("it ended"):
        done = (
            "no Trainer has trained"
            if is_trainer_job(plan.job)
            else "no optimizer has made a step after backward()"
        )
        run = replace(run, note=f"it ended, and {done} on {plural(ranks, 'rank')} in it")
    return TracedRun(engine, run, read_trace(engine, log))


def _figures(log: Path, ranks: int, _: Path) -> dict[str, Any] | None:
    """Return the figures of a run that has ended; None if a rank has no trace."""
    trace = read_trace("", log)
    return None if trace is None or trace.size != ranks else {"steps": len(trace.steps)}


def _result_line(its: TracedRun, plan: Plan) -> str:
    ranks = its.run.identity["ranks"]
    if not its.done:
        return f"{its.engine} on {plural(ranks, 'rank')}: {its.run.state} ({its.run.seconds:.0f} s)"
    steps = its.run.figures["steps"]
    more = f", as the job makes no more than {steps}" if steps < plan.steps else ""
    return f"{its.engine} on {plural(ranks, 'rank')}: {plural(steps, 'step')} ({its.run.seconds:.0f} s){more}"
