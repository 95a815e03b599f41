"""Run the job with tracing on each engine, one after the other, as a user would start it."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvd_trainer.errors import OptionError
from hvd_trainer.measure.command import read_backends
from hvd_trainer.measure.measured import MeasuredTrial
from hvd_trainer.measure.trials import RunRecord, TrialRunner
from hvd_trainer.tools.parity.traces import Trace, read_trace
from hvd_trainer.utils.text import plural

ENGINES = ("horovod", "ddp", "single")


@dataclass(frozen=True)
class TracedRun:
    """A run and its trace; a failed run has the trace of the steps it made."""

    engine: str
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


@dataclass(frozen=True, kw_only=True)
class TracedTrial(MeasuredTrial):
    """A way to run the job on an engine: as a user would type it, but for the steps that are traced."""

    @classmethod
    def of(
        cls, job: Sequence[str], engine: str, ranks: int, threads: int, steps: int, like: Trace | None = None
    ) -> TracedTrial:
        """Return a trial that traces `steps` steps.

        Args:
            like: for `single`: a run on many ranks, whose global batch it takes.
        """
        options = {} if like is None or engine != "single" else global_batch_options(like)
        ranks = 1 if engine == "single" else ranks
        return cls(
            job=job,
            engine=engine,
            ranks=ranks,
            threads=threads,
            steps=steps,
            endless=False,
            options=options,
            record={"trace_steps": steps},
            label=f"{engine} on {plural(ranks, 'rank')}",
            identity={"engine": engine, "ranks": ranks, "words": [*job], "options": options},
        )

    def read(self, log: Path) -> dict[str, Any] | None:
        """Return the number of steps that were traced; None if a rank has no trace."""
        trace = read_trace(self.engine, log)
        return None if trace is None or trace.size != self.ranks else {"steps": len(trace.steps)}


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
    engines: Sequence[str], job: Sequence[str], ranks: int, threads: int, steps: int, runner: TrialRunner
) -> list[TracedRun]:
    """Run the job on each engine and print each result; after a failed run the others are run all the same."""
    for engine in ENGINES:
        shutil.rmtree(runner.folder / engine, ignore_errors=True)
    for engine in engines:  # raises before the first run if a launcher is missing
        TracedTrial.of(job, engine, ranks, threads, steps).start(runner.folder)
    runs: list[TracedRun] = []
    for engine in engines:
        like = next((run.trace for run in runs if run.trace is not None), None)
        trial = TracedTrial.of(job, engine, ranks, threads, steps, like)
        record = runner.run(trial, keep=runner.folder / engine)
        made = record.figures.get("steps", steps)
        said = plural(made, "step") if record.state == "done" else record.state
        more = f", as the job makes no more than {made}" if made < steps else ""
        print(f"{trial.label}: {said} ({record.seconds:.0f} s){more}", flush=True)
        runs.append(TracedRun(engine, record, read_trace(engine, runner.folder / engine)))
    return runs
