"""One run of one contestant: start it as a user would, wait, and read what the probes saw."""

from __future__ import annotations

import json
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks import NO_GPUS
from benchmarks.contestants import Contestant
from hvd_trainer.measure.command import OPEN_MPI, command_for
from hvd_trainer.measure.figures import read_steps
from hvd_trainer.measure.message import Message
from hvd_trainer.measure.start import Start, run_to_end

REPOSITORY = Path(__file__).resolve().parent.parent


class RunError(RuntimeError):
    """A run gave no valid figure; the message has the reason and the end of its output."""


@dataclass(frozen=True)
class Measurement:
    """``images_per_s`` is of all ranks, ``startup_s`` from command to first step, ``peak_mb`` of one rank."""

    images_per_s: float
    startup_s: float
    peak_mb: float
    exit_code: int | None
    """None: it was ended at the time limit"""


def python_path() -> dict[str, str]:
    """The variable by which ranks find the modules of this repository."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))}


def start_of(contestant: Contestant, ranks: int, data_dir: Path, log_dir: Path) -> Start:
    """The contestant's command under its launcher, with a recorder in front of its script."""
    words = [word.format(data=data_dir, log=log_dir) for word in contestant.arguments.split()]
    command = command_for(contestant.launcher, ranks, ["-m", "hvd_trainer.measure", *words])
    recorded = Message(log_dir=str(log_dir / "recorded")).variables()
    return Start(command, {**NO_GPUS, **OPEN_MPI, **python_path(), **recorded}, threads=1)


def run(contestant: Contestant, ranks: int, data_dir: Path, *, limit_s: float) -> Measurement:
    """Start the contestant with ``ranks`` processes, one CPU thread each, and measure it.

    Raises:
        RunError: it ran into the time limit, or did not do the job's steps in every rank.
    """
    job = contestant.job
    with tempfile.TemporaryDirectory(prefix="hvd-benchmark-") as name:
        folder, steps = Path(name), job.steps(ranks)
        start = start_of(contestant, ranks, data_dir, folder / "log")
        output = folder / "output"
        started = time.time()
        exit_code = run_to_end(start, folder, output, limit_s=limit_s)
        recorded = read_steps(folder / "log" / "recorded")
        done = [len(rank["step"]) for rank in recorded]
        if done != [steps] * ranks:
            raise RunError(
                f"{contestant.name}: asked for {ranks} ranks of {steps} steps in "
                f"{limit_s:g} s, found {done or 'none'}, exit code {exit_code}; command: "
                f"{' '.join(start.command)}\n{output.read_text(errors='replace')[-4000:]}"
            )
    return Measurement(
        images_per_s=sum(job.timed_samples(ranks) / rank["seconds"][job.warmup :].sum() for rank in recorded),
        startup_s=max(float(rank["first_step_at"]) for rank in recorded) - started,
        peak_mb=max(json.loads(str(rank["results"]))["peak_memory_mb"] for rank in recorded),
        exit_code=exit_code,
    )
