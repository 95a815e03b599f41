"""The trials of a comparison: each entry on each number of ranks, with each variant of the job.

Nothing is started here. A trial that cannot be is found by the checks that the job itself would make.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from hvd_trainer import backends
from hvd_trainer.config.batch_plan import BatchPlan
from hvd_trainer.config.options import TrainerOptions
from hvd_trainer.config.rules import check
from hvd_trainer.errors import OptionError, UserError
from hvd_trainer.parallel.grid import check_stages
from hvd_trainer.parallel.schedule import check_chunks
from hvd_trainer.tools.compare.entries import Entry
from hvd_trainer.tools.compare.job_options import with_values
from hvd_trainer.tools.compare.variants import Axis, Variant
from hvd_trainer.tools.runner.command import script_checksum
from hvd_trainer.tools.runner.measured import measured_start, read_measured
from hvd_trainer.tools.runner.runs import Start, key_of
from hvd_trainer.utils.text import plural

ENTRIES, RANKS = "engine", "ranks"
"""The axes that every comparison has."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One entry on one number of ranks, with one variant of the job."""

    entry: Entry
    ranks: int
    threads: int
    """of each rank, on the CPU"""
    variant: Variant
    conditions: Mapping[str, Any]
    """what else decides on its figures: versions, steps that do not count"""
    options: TrainerOptions | None = None
    """the job's options on its engine; None without `--vary`"""
    steps: int | None = None
    """that each run makes, warm-up included; None: as many as the job does by itself"""
    reason: str | None = None
    """why it cannot be; None if it can, as far as is known without starting it"""

    @property
    def label(self) -> str:
        """`ddp x 2, chunks 4`."""
        return ", ".join(filter(None, (f"{self.entry.name} x {self.ranks}", self.variant.label)))

    @property
    def values(self) -> Mapping[str, str]:
        """Its place on each axis."""
        return {ENTRIES: self.entry.name, RANKS: str(self.ranks), **self.variant.values}

    @property
    def processes(self) -> int:
        """Return how many processes it consists of: the ranks of DataParallel are GPUs of one."""
        return 1 if self.entry.engine == "data-parallel" else self.ranks

    @property
    def job(self) -> tuple[str, ...]:
        """The words that follow `python`."""
        return self.entry.script or self.variant.words

    def start(self, log: Path) -> Start:
        """Return how to start a run of it."""
        start = measured_start(
            self.job,
            engine=self.entry.engine,
            ranks=self.ranks,
            log=log,
            threads=self.threads,
            steps=self.steps,
            native=not self.entry.is_job,
        )
        return start._replace(variables={**start.variables, **self._visible_gpus()})

    def _visible_gpus(self) -> dict[str, str]:
        """Hide GPUs from DataParallel, which takes all that it sees."""
        if self.entry.engine != "data-parallel":
            return {}
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(self.ranks)))).split(",")
        return {"CUDA_VISIBLE_DEVICES": ",".join(visible[: self.ranks])}

    def read(self, log: Path) -> dict[str, Any] | None:
        """Return the figures of a run of it; None if it did not come to its end.

        Raises:
            OptionError: no step counts, or each rank has trained alone.
        """
        warmup_steps, native = self.conditions["warmup_steps"], not self.entry.is_job
        figures = read_measured(log, job=self.job, ranks=self.processes, warmup_steps=warmup_steps, native=native)
        if figures is not None:
            self.check_steps(figures)
        return figures

    def check_steps(self, figures: Mapping[str, Any]) -> None:
        """Check that a run has steps that count, of ranks that work together.

        Raises:
            OptionError: all of them belong to the warm-up, or each rank has trained alone.
        """
        work, warmup_steps = figures["work"], self.conditions["warmup_steps"]
        if work.get("world_size", self.ranks) != self.ranks:
            raise OptionError(
                f"{self.label}: the script has started no engine with {plural(self.ranks, 'rank')}, so that each "
                f"of its processes has trained alone. Add to the script: hvd.init() of horovod.torch, or "
                f"torch.distributed.init_process_group()"
            )
        if "step_s" not in figures:
            raise OptionError(
                f"{self.label} makes {plural(work['steps'], 'step')}, and the first {warmup_steps} do not count: "
                f"give the job more --epochs, or type a lower --warmup-steps"
            )

    @property
    def identity(self) -> dict[str, Any]:
        """All that decides on its figures, in plain JSON."""
        script = self.entry.script
        job = self.variant.identity if script is None else {"words": [*script], "script": script_checksum(script)}
        return {
            "entry": self.entry.name,
            "engine": self.entry.engine,
            "ranks": self.ranks,
            "threads": self.threads,
            "steps": self.steps,
            **job,
            **self.conditions,
        }

    @cached_property
    def key(self) -> str:
        return key_of(self.identity)


def make_trials(
    entries: Sequence[Entry],
    numbers: Sequence[int],
    variants: Sequence[Variant],
    *,
    threads: int,
    conditions: Mapping[str, Any],
    steps: int | None = None,
) -> list[Trial]:
    """Return all trials; those that differ only in their entry stand side by side.

    `single` is on one rank only, `data-parallel` never is.
    """
    trials = []
    for ranks, variant, entry in itertools.product(numbers, variants, entries):
        if entry.engine == ("data-parallel" if ranks == 1 else "single"):
            continue
        options = variant.options and with_values(variant.options, {"backend": entry.engine})
        trials.append(
            Trial(
                entry=entry,
                ranks=ranks,
                threads=threads,
                variant=variant,
                conditions=conditions,
                steps=steps,
                options=options,
                reason=None if options is None else why_impossible(options, ranks),
            )
        )
    return trials


def axes_of(trials: Sequence[Trial], varied: Sequence[Axis]) -> list[Axis]:
    """Return all axes: engines, ranks, and those of `--vary`."""
    return [
        *(Axis(name, tuple(dict.fromkeys(trial.values[name] for trial in trials))) for name in (ENTRIES, RANKS)),
        *varied,
    ]


def why_impossible(options: TrainerOptions, ranks: int) -> str | None:
    """Return why a job with these options cannot be started so; None if nothing is known against it."""
    parallel = options.parallel
    try:
        check(options)
        check_stages(parallel.stages, ranks)
        _check_engine(options.engine)
        batch_size = BatchPlan.of(options.train, ranks // parallel.stages).batch_size
        if parallel.is_staged:
            check_chunks(parallel.schedule, parallel.stages, parallel.num_chunks)
    except UserError as error:
        return str(error)
    if parallel.is_staged and parallel.num_chunks > batch_size:
        return f"{parallel.num_chunks} chunks cut a batch of {batch_size} into less than one sample"
    return None


@cache
def _check_engine(options: backends.EngineOptions) -> None:
    """Create the engine, which checks its options, without starting it."""
    backends.create(options, {})
