"""A trial whose steps are recorded, of any job.

Trainer job    LAUNCHER python JOB --backend ENGINE --log-dir LOG --record-steps ...
script         LAUNCHER python -m hvd_trainer run --backend ENGINE -- SCRIPT, and the variable of ProbeOptions
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hvd_trainer.measure.formats import number
from hvd_trainer.tools.probe.options import ProbeOptions
from hvd_trainer.tools.runner.command import (
    ENDLESS,
    LAUNCHER_OF,
    NOT_SAVED,
    OPEN_MPI,
    command_for,
    launcher_of,
    option_of,
    with_options,
)
from hvd_trainer.tools.runner.job_kind import is_trainer_job
from hvd_trainer.tools.runner.processes import Start
from hvd_trainer.tools.runner.records import RunRecord
from hvd_trainer.tools.runner.step_stats import read_figures, read_probed

SAME_NUMBERS = ("--exactly-horovod",)
"""Options of `run` with which a script for Horovod computes the same on both engines."""


@dataclass(frozen=True, kw_only=True)
class MeasuredTrial:
    """A way to run a job, a `Trial` of the runner, whose figures are those of its recorded steps."""

    job: Sequence[str]
    """the words that follow `python`"""
    engine: str
    """a name in `LAUNCHER_OF`; `launcher_of` it starts the ranks"""
    ranks: int
    threads: int | None = None
    """of each rank, on the CPU; None: as this process's environment says"""
    steps: int | None = None
    """that a run makes, however much data it has; None: as many as the job does by itself"""
    warmup_steps: int = 0
    """steps at its beginning that do not count"""
    leave_out: tuple[Literal["exchange", "data"], ...] = ()
    """as in `MeasureOptions`"""
    options: Sequence[str] = ()
    """further options of a Trainer job; for a script, of `run`"""
    native: bool = False
    """take the job for a script, whose own engine is not replaced"""
    probe: Mapping[str, Any] = field(default_factory=dict)
    """further fields of `ProbeOptions`, for a script"""
    label: str = ""
    identity: Mapping[str, Any] = field(default_factory=dict)

    @property
    def _is_trainer_job(self) -> bool:
        return not self.native and is_trainer_job(self.job)

    def start(self, log: Path) -> Start:
        """Return how to start a run, whose log folder is `log`.

        Raises:
            OptionError: the launcher is not installed.
        """
        if self._is_trainer_job:
            words = self._trainer_words(log)
            launcher = launcher_of(self.engine, words)
            command = command_for(launcher, self.ranks, words)
            variables = OPEN_MPI if launcher == "mpirun" else {}
            if self.engine == "data-parallel":  # it takes all GPUs that it sees
                visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(self.ranks)))).split(",")
                variables = {"CUDA_VISIBLE_DEVICES": ",".join(visible[: self.ranks])}
            return Start(command, variables, self.threads)
        backend = "ddp" if self.engine == "single" else self.engine
        words = ["-m", "hvd_trainer", "run", "--backend", backend, *self.options, "--"]
        if self.native:
            words = ["-m", "hvd_trainer.tools.probe"]
        asked = ProbeOptions(log_dir=str(log), max_steps=self.steps, leave_out=self.leave_out, **self.probe)
        command = command_for(LAUNCHER_OF[self.engine], self.ranks, [*words, *self.job])
        return Start(command, asked.variables(), self.threads)

    def _trainer_words(self, log: Path) -> list[str]:
        words = [*self.options, *(("--leave-out", *self.leave_out) if self.leave_out else ())]
        if self.steps is not None:
            words = [*ENDLESS, *words, "--max-steps", str(self.steps)]
        words = with_options(self.job, words)
        given = {option_of(word) for word in words}
        for name, value in zip(NOT_SAVED[::2], NOT_SAVED[1::2], strict=True):
            words += () if name in given else (name, value)
        return [*words, "--backend", self.engine, "--log-dir", str(log), "--record-steps"]

    def read(self, log: Path) -> dict[str, Any] | None:
        """Return the figures of a run; None if it did not come to its end."""
        # The ranks of DataParallel are GPUs of one process.
        processes = 1 if self.engine == "data-parallel" else self.ranks
        read = read_figures if self._is_trainer_job else read_probed
        return read(log, processes, self.warmup_steps)


def describe_speed(run: RunRecord) -> str:
    """Return `14,210 samples/s (12 s)`; of a script, which does not tell its samples, the steps per second."""
    rate = run.figures.get("samples_per_s")
    speed = f"{number(1 / run.figures['step_s'])} steps/s" if rate is None else f"{number(rate)} samples/s"
    return f"{speed} ({run.seconds:.0f} s)"
