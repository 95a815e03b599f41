"""Run the job with tracing on each engine, one after the other, as a user would start it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hvd_trainer.errors import OptionError
from hvd_trainer.measure.command import read_backends
from hvd_trainer.measure.measured import SAME_NUMBERS, SAME_SUMS, MeasuredTrial
from hvd_trainer.measure.tool_folder import remove_inner
from hvd_trainer.measure.trials import RunRecord, TrialRunner
from hvd_trainer.tools.parity.traces import VERSIONS, Trace, read_trace
from hvd_trainer.utils.text import plural

ENGINES = ("horovod", "ddp", "single")


@dataclass(frozen=True, kw_only=True)
class TracedTrial(MeasuredTrial):
    """A trial whose figure is the number of steps in its trace."""

    name: str
    """of the trace"""

    def read(self, log: Path) -> dict[str, Any] | None:
        """Return the figure of a run; None if a rank has left no trace."""
        trace = read_trace(self.name, log)
        return None if trace is None or trace.size != self.ranks else {"steps": len(trace.steps)}


class Side(NamedTuple):
    """One of the runs that are compared."""

    name: str
    engine: str
    job: Sequence[str]

    def trial(
        self, ranks: int, threads: int, steps: int, like: Trace | None = None, *, exactly: bool = True
    ) -> TracedTrial:
        """Return how it is run: as a user would type it, but for the steps that are traced.

        Args:
            like: for `single`: a run on many ranks, whose global batch it takes.
            exactly: whether a script for Horovod computes what it does on Horovod, its traps included.
        """
        name, engine, job = self
        options = {} if like is None or engine != "single" else global_batch_options(like)
        ranks = 1 if engine == "single" else ranks
        return TracedTrial(
            name=name,
            label=f"{name if name == engine else f'{name}, {engine}'} on {plural(ranks, 'rank')}",
            job=job,
            engine=engine,
            ranks=ranks,
            threads=threads,
            steps=steps,
            run_options=(*(SAME_NUMBERS if exactly else ()), *(SAME_SUMS if name in VERSIONS else ())),
            options=options,
            endless=False,
            record={"trace_steps": steps},
        )


class TracedRun(NamedTuple):
    """A run and its trace; a failed run has the trace of the steps it made."""

    name: str
    record: RunRecord
    trace: Trace | None

    @property
    def done(self) -> bool:
        return self.record.state == "done"


def parse_engines(text: str) -> list[str]:
    """Parse the list of engines; `single` comes last, as it takes its global batch from the others.

    Raises:
        OptionError: an unknown one, one that comes twice, or fewer than two.
    """
    return sorted(read_backends(text, ENGINES, least=2), key=lambda name: name == "single")


def versions(text: str, job: Sequence[str], new: Path) -> list[Side]:
    """Return the runs of a script as it is and of a new version of it, on the engines of `--backend`.

    Raises:
        OptionError: there is no such file, the job is no script, or these are not two engines.
    """
    engines = [name.strip() for name in text.split(",")]
    if not new.is_file() or job[0] == "-m":
        raise OptionError(f"--new {new}: name a file, and behind -- the script that it is a new version of")
    if len(engines) != len(VERSIONS) or not {*engines} <= {"horovod", "ddp"}:
        raise OptionError(f"--backend {text}: with --new it is horovod,ddp or ddp,ddp, of the old and of the new")
    jobs = (job, [str(new), *job[1:]])
    return [Side(*side) for side in zip(VERSIONS, engines, jobs, strict=True)]


def global_batch_options(like: Trace) -> dict[str, Any]:
    """Return options with which one process takes as many samples in a step as the ranks of `like` do together.

    It takes them in further passes, each as large as a rank's batch: so they fit in memory where that does, and
    scaling of the learning rate gives the same rate. Batch norm over the global batch needs one large pass.

    Raises:
        OptionError: the job is not built on the Trainer, which has such options.
    """
    if like.is_script:
        raise OptionError(
            "--backend with single takes the ranks' batches together by options of the Trainer, on which this job "
            "is not built. Type: --backend horovod,ddp"
        )
    options, size = like.options, like.start["copies"]
    if options["reproducible"] is not None:  # its virtual ranks fix the global batch
        return {}
    if options["sync_batch_norm"]:
        return {"batch_size": int(like.facts["batch_size"]) * size}
    return {"accumulate": int(options["accumulate"]) * size}


def trace_all(
    sides: Sequence[Side], ranks: int, threads: int, steps: int, runner: TrialRunner, *, exactly: bool = True
) -> list[TracedRun]:
    """Make each run and print its result; after a failed run the others are made all the same."""
    for name in (*ENGINES, *VERSIONS):
        remove_inner(runner.folder / name)
    for side in sides:  # raises before the first run if a launcher is missing
        side.trial(ranks, threads, steps).start(runner.folder)
    runs: list[TracedRun] = []
    for left, side in zip(reversed(range(len(sides))), sides, strict=True):
        like = next((run.trace for run in runs if run.trace is not None), None)
        trial, kept = side.trial(ranks, threads, steps, like, exactly=exactly), runner.folder / side.name
        record = runner.run(trial, keep=kept)
        made = record.figures.get("steps", steps)
        said = plural(made, "step") if record.state == "done" else record.state
        more = f", as the job makes no more than {made}" if made < steps else ""
        more += f", about {left * record.seconds:.0f} s left" if left else ""
        print(f"{trial.label}: {said} ({record.seconds:.0f} s){more}", flush=True)
        runs.append(TracedRun(side.name, record, read_trace(side.name, kept)))
    return runs
