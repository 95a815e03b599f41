"""The runs that are compared: the same job on each engine, as a user would start it, one after the other."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from hvd_trainer.errors import OptionError
from hvd_trainer.tools.parity.traces import Trace, read_trace
from hvd_trainer.tools.runner.command import LAUNCHER_OF, NOT_SAVED, command_for, option_of, read_job
from hvd_trainer.tools.runner.runs import RUNS, Run, append_run, run_once
from hvd_trainer.utils.text import plural

TRACED = "traced"
ENGINES = ("horovod", "ddp", "single")
OURS = ("--trace-steps", "--resume")
"""Options that the job may not have, beside those that `read_job` refuses."""


@dataclass(frozen=True)
class Traced:
    """A run, and what it has kept: also one that has failed, as far as it came."""

    engine: str
    run: Run
    trace: Trace | None
    log: Path

    @property
    def done(self) -> bool:
        return self.run.state == "done"

    def trouble(self, folder: Path) -> str:
        """Why it is not done."""
        kept = f"; its output is in {folder / self.run.output}" if self.run.output else ""
        return f"{self.engine} {self.run.state}: {self.run.note}{kept}"


def read_traced_job(words: Sequence[str], steps: int) -> tuple[tuple[str, ...], int]:
    """The job, as what follows `python`, and how many steps it makes: its own --max-steps, if that is less.

    Raises:
        OptionError: there is no job, or it is given what the comparison gives.
    """
    job = read_job(words)
    taken = [word for word in job if option_of(word) in OURS]
    if taken:
        raise OptionError(
            f"Leave {' and '.join(taken)} out of the job: all runs are new ones, from their first step"
        )
    for place, word in enumerate(job):
        if option_of(word) == "--max-steps":
            text = word.partition("=")[2] if "=" in word else "".join(job[place + 1 : place + 2])
            steps = min(steps, int(text)) if text.isdecimal() and int(text) > 0 else steps
    return job, steps


def engines_of(text: str) -> list[str]:
    """The engines, `single` last: it takes its global batch from the others.

    Raises:
        OptionError: an unknown one, one that comes twice, or fewer than two.
    """
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in ENGINES:
            raise OptionError(f"--engines {text}: there are {', '.join(ENGINES)}, and not {name!r}")
    if len(names) != len(set(names)) or len(names) < 2:
        raise OptionError(f"--engines {text}: name two or three, each once, such as --engines horovod,ddp,single")
    return sorted(names, key=lambda name: name == "single")


@dataclass(frozen=True)
class Plan:
    """How the job is started on each engine."""

    job: tuple[str, ...]
    steps: int
    ranks: int
    threads: int
    """of each rank, on the CPU"""
    limit_s: float

    def command(self, engine: str, log: Path, like: Trace | None = None) -> list[str]:
        """What a user would type.

        Args:
            log: the log folder.
            like: for one process: a run on many ranks, whose global batch it shall have.

        Raises:
            OptionError: the launcher is not installed.
        """
        words = [*self.job, *NOT_SAVED, "--max-steps", str(self.steps), "--trace-steps", str(self.steps)]
        words += ["--backend", engine, "--log-dir", str(log)]
        if engine == "single" and like is not None:
            words += same_global_batch(like)
        return command_for(LAUNCHER_OF[engine], self.ranks, words)


def same_global_batch(like: Trace) -> list[str]:
    """Options with which one process takes as many samples in a step as many ranks.

    As further passes of each step: each as large as a rank's, so that it fits where that does, and scaling of the
    learning rate gives the same. Batch norm over the global batch needs that in one piece.
    """
    options, size = like.options, like.start["copies"]
    if options["reproducible"] is not None:  # virtual ranks have it already
        return []
    if options["sync_batch_norm"]:
        return ["--batch-size", str(int(like.facts["batch_size"]) * size)]
    return ["--accumulate", str(int(options["accumulate"]) * size)]


def trace_all(engines: Sequence[str], plan: Plan, folder: Path) -> list[Traced]:
    """Runs the job on each engine; a run that fails is told, and the others go on."""
    for old in (folder / TRACED, folder / "failed"):
        shutil.rmtree(old, ignore_errors=True)
    (folder / RUNS).unlink(missing_ok=True)
    for engine in engines:
        plan.command(engine, folder)  # before anything runs, it is known whether all can
    done: list[Traced] = []
    for engine in engines:
        like = next((its.trace for its in done if its.trace is not None), None)
        done.append(_trace(engine, plan, folder, like))
        append_run(folder, done[-1].run)
        print(_result(done[-1], plan), flush=True)
    return done


def _trace(engine: str, plan: Plan, folder: Path, like: Trace | None) -> Traced:
    log = folder / TRACED / engine
    ranks = 1 if LAUNCHER_OF[engine] == "python" else plan.ranks
    command = plan.command(engine, log, like)
    identity = {"engine": engine, "ranks": ranks, "words": command[1:]}
    run = run_once(
        command,
        folder,
        identity,
        1,
        threads=plan.threads,
        limit_s=plan.limit_s,
        read=partial(_figures, log, ranks),
    )
    if run.state == "failed" and run.note.startswith("exit code"):
        run = replace(run, note=f"it ended, and no Trainer has trained on {plural(ranks, 'rank')} in it")
    return Traced(engine, run, read_trace(engine, log), log)


def _figures(log: Path, ranks: int, _: Path) -> dict[str, Any] | None:
    """What is worth to be known of a run that has ended; None if it has not kept what it should."""
    trace = read_trace("", log)
    return None if trace is None or trace.size != ranks else {"steps": len(trace.steps)}


def _result(its: Traced, plan: Plan) -> str:
    ranks = its.run.identity["ranks"]
    if not its.done:
        return f"{its.engine} on {plural(ranks, 'rank')}: {its.run.state} ({its.run.seconds:.0f} s)"
    steps = its.run.figures["steps"]
    more = f", as the job makes no more than {steps}" if steps < plan.steps else ""
    return f"{its.engine} on {plural(ranks, 'rank')}: {plural(steps, 'step')} ({its.run.seconds:.0f} s){more}"
