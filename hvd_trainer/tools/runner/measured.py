"""Start measured runs of any job, and read their figures.

Trainer job    LAUNCHER python JOB --backend ENGINE --log-dir LOG --record-steps ...
script         LAUNCHER python -m hvd_trainer run --backend ENGINE -- SCRIPT, and the variable of ProbeOptions
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from hvd_trainer.tools.probe.options import ProbeOptions
from hvd_trainer.tools.runner.command import ENDLESS, LAUNCHER_OF, NOT_SAVED, command_for, option_of, with_options
from hvd_trainer.tools.runner.job_kind import is_trainer_job
from hvd_trainer.tools.runner.processes import Start
from hvd_trainer.tools.runner.step_stats import read_figures, read_probed


def measured_start(
    job: Sequence[str],
    *,
    engine: str,
    ranks: int,
    log: Path,
    threads: int | None = None,
    steps: int | None = None,
    leave_out: tuple[Literal["exchange", "data"], ...] = (),
    options: Sequence[str] = (),
    native: bool = False,
    **probe: Any,
) -> Start:
    """Return how to start a run of a job whose steps are recorded.

    Args:
        job: the words that follow `python`.
        engine: a name in `LAUNCHER_OF`, whose launcher starts the ranks.
        log: the run's log folder.
        threads: of each rank, on the CPU; None: as this process's environment says.
        steps: how many it makes, however much data it has; None: as many as the job does by itself.
        leave_out: as in `MeasureOptions`.
        options: further options of a Trainer job; for a script, of `run`.
        native: take the job for a script, whose own engine is not replaced.
        probe: further fields of `ProbeOptions`, for a script.
    """
    launcher = LAUNCHER_OF[engine]
    if not native and is_trainer_job(job):
        words = [*options, *(("--leave-out", *leave_out) if leave_out else ())]
        if steps is not None:
            words = [*ENDLESS, *words, "--max-steps", str(steps)]
        words = with_options(job, words)
        given = {option_of(word) for word in words}
        for name, value in zip(NOT_SAVED[::2], NOT_SAVED[1::2], strict=True):
            words += () if name in given else (name, value)
        words += ["--backend", engine, "--log-dir", str(log), "--record-steps"]
        return Start(command_for(launcher, ranks, words), threads=threads)
    backend = "ddp" if engine == "single" else engine
    words = ["-m", "hvd_trainer", "run", "--backend", backend, *options, "--"]
    if native:
        words = ["-m", "hvd_trainer.tools.probe"]
    asked = ProbeOptions(log_dir=str(log), max_steps=steps, leave_out=leave_out, **probe)
    return Start(command_for(launcher, ranks, [*words, *job]), asked.variables(), threads)


def read_measured(
    log: Path, *, job: Sequence[str], ranks: int, warmup_steps: int, native: bool = False
) -> dict[str, Any] | None:
    """Return the figures of a run that `measured_start` describes; None if it did not come to its end."""
    read = read_figures if not native and is_trainer_job(job) else read_probed
    return read(log, ranks, warmup_steps)
