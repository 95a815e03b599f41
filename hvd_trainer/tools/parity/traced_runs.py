"""Run the job with tracing on each engine, one after the other, as a user would start it."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvd_trainer.errors import OptionError
from hvd_trainer.tools.parity.traces import Trace, read_trace
from hvd_trainer.tools.runner.command import LAUNCHER_OF, NOT_SAVED, command_for, option_values
from hvd_trainer.tools.runner.job_kind import is_trainer_job
from hvd_trainer.tools.runner.measured import MeasuredTrial
from hvd_trainer.tools.runner.processes import Start
from hvd_trainer.tools.runner.records import RunRecord
from hvd_trainer.tools.runner.trial_runner import JobTrial, TrialRunner
from hvd_trainer.utils.text import plural

TRACES_FOLDER = "traced"
ENGINES = ("horovod", "ddp", "single")


@dataclass(frozen=True)
class TracedRun:
    """A run and its trace; a failed run has the trace of the steps it made."""

    engine: str
    run: RunRecord
    trace: Trace | None

    @property
    def done(self) -> bool:
        return self.run.state == "done"


def steps_of(job: Sequence[str], steps: int) -> int:
    """Return the number of steps of each run: at most the --max-steps of a job that is built on the Trainer."""
    own = option_values(job, "--max-steps") if is_trainer_job(job) else []
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
            return MeasuredTrial(
                job=self.job,
                engine=engine,
                ranks=self.ranks,
                threads=self.threads,
                steps=self.steps,
                probe={"trace_steps": self.steps},
            ).start(log)
        words = [*self.job, *NOT_SAVED, "--max-steps", str(self.steps), "--trace-steps", str(self.steps)]
        words += ["--backend", engine, "--log-dir", str(log)]
        if engine == "single" and like is not None:
            words += global_batch_options(like)
        return Start(command_for(LAUNCHER_OF[engine], self.ranks, words), threads=self.threads)


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
    shutil.rmtree(folder / TRACES_FOLDER, ignore_errors=True)
    for engine in engines:
        plan.start(engine, folder)  # raises before the first run if a launcher is missing
    runner = TrialRunner(folder, limit_s=plan.limit_s, resume=False)  # the job may have been changed since
    done: list[TracedRun] = []
    for engine in engines:
        like = next((its.trace for its in done if its.trace is not None), None)
        done.append(_trace(engine, plan, runner, like))
    return done


def _trace(engine: str, plan: Plan, runner: TrialRunner, like: Trace | None) -> TracedRun:
    log, ranks = runner.folder / TRACES_FOLDER / engine, 1 if engine == "single" else plan.ranks
    start = plan.start(engine, log, like)

    def read(_: Path) -> dict[str, Any] | None:
        """Return the figures of a run that has ended; None if a rank has no trace."""
        trace = read_trace(engine, log)
        return None if trace is None or trace.size != ranks else {"steps": len(trace.steps)}

    identity = {"engine": engine, "ranks": ranks, "words": start.command[1:]}
    label = f"{engine} on {plural(ranks, 'rank')}"
    run = runner.run(JobTrial(label, identity, lambda _: start, read))
    seconds = f"({run.seconds:.0f} s)"
    if run.state == "done":
        steps = run.figures["steps"]
        more = f", as the job makes no more than {steps}" if steps < plan.steps else ""
        print(f"{label}: {plural(steps, 'step')} {seconds}{more}", flush=True)
    else:
        print(f"{label}: {run.state} {seconds}", flush=True)
    return TracedRun(engine, run, read_trace(engine, log))
