"""A trial whose steps are recorded, of any job: on the Trainer, for horovod.torch, or for torch.distributed.

LAUNCHER python -m hvd_trainer run --backend ENGINE -- JOB, and a `Message` in the environment
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from hvd_trainer.measure.command import OPEN_MPI, command_for, launcher_of
from hvd_trainer.measure.figures import read_figures
from hvd_trainer.measure.formats import number
from hvd_trainer.measure.message import Message
from hvd_trainer.measure.stale import digest_of_files
from hvd_trainer.measure.start import Start
from hvd_trainer.measure.trials import RunRecord, key_of

SAME_NUMBERS = ("--exactly-horovod",)
"""Options of `run` with which a script for Horovod computes the same on both engines."""
SAME_SUMS = ("--fusion-threshold-mb", "0", "--bucket-mb", "1e-6")
"""Options of `run` that make each gradient of a script a message of its own. From three ranks on, the order in
which Gloo adds up an element depends on its place in the message, Horovod packs gradients as they come, and DDP
lays out other messages after its first step."""


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
    exchange: bool = True
    """as in `Message`"""
    run_options: Sequence[str] = SAME_NUMBERS
    """further options of `run`, for a script"""
    options: Mapping[str, Any] = field(default_factory=dict)
    """further options of a job on the Trainer, by their names in YAML"""
    endless: bool = True
    """as in `Message`"""
    native: bool = False
    """take the job for a script, whose own engine is not replaced"""
    record: Mapping[str, Any] = field(default_factory=dict)
    """further fields of `Message`: what to record besides the steps"""
    label: str = ""
    conditions: Mapping[str, Any] = field(default_factory=dict)
    """what the figures depend on besides, such as the machine"""

    @cached_property
    def identity(self) -> dict[str, Any]:
        """All that decides on its figures: how it is run, the files among its words, and its conditions."""
        threads = os.environ.get("OMP_NUM_THREADS") if self.threads is None else self.threads
        return {
            **{"words": [*self.job], "files": digest_of_files(self.job)},
            **{"engine": self.engine, "native": self.native, "ranks": self.ranks, "threads": threads},
            **{"steps": self.steps, "warmup_steps": self.warmup_steps, "endless": self.endless},
            **{"run_options": [*self.run_options], "options": {**self.options}, "record": {**self.record}},
            **{"exchange": self.exchange},
            **self.conditions,
        }

    @cached_property
    def key(self) -> str:
        return key_of(self.identity)

    def start(self, log: Path) -> Start:
        """Return how to start a run, whose recordings are in `log`.

        Raises:
            OptionError: the launcher is not installed.
        """
        backend = "horovod" if self.engine == "horovod" else "ddp"
        words = ["-m", "hvd_trainer", "run", "--backend", backend, *self.run_options, "--"]
        if self.native:
            words = ["-m", "hvd_trainer.measure"]
        message = Message(
            log_dir=str(log),
            engine=None if self.native else self.engine,
            max_steps=self.steps,
            endless=self.endless,
            exchange=self.exchange,
            options=self.options,
            **self.record,
        )
        launcher = launcher_of(self.engine, self.job)
        variables = dict(OPEN_MPI) if launcher == "mpirun" else {}
        if self.engine == "data-parallel":  # it takes all GPUs that it sees
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(self.ranks)))).split(",")
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(visible[: self.ranks])
        command = command_for(launcher, self.ranks, [*words, *self.job])
        return Start(command, {**variables, **message.variables()}, self.threads)

    def read(self, log: Path) -> dict[str, Any] | None:
        """Return the figures of a run; None if it did not come to its end."""
        return read_figures(log, self.processes, self.warmup_steps)

    @property
    def processes(self) -> int:
        """The processes of a run: the ranks of DataParallel are GPUs of a single one."""
        return 1 if self.engine == "data-parallel" else self.ranks


def describe_speed(run: RunRecord) -> str:
    """Return `14,210 samples/s (12 s)`; of a script, which does not tell its samples, the steps per second."""
    rate = run.figures.get("samples_per_s")
    speed = f"{number(1 / run.figures['step_s'])} steps/s" if rate is None else f"{number(rate)} samples/s"
    return f"{speed} ({run.seconds:.0f} s)"
