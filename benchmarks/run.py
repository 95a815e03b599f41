"""One run of one contestant: start it as a user would, wait, and read what the probes saw."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks import NO_GPUS
from benchmarks.contestants import Contestant
from hvd_trainer.tools.runner.command import LAUNCHER_OF
from hvd_trainer.tools.runner.measured import Start, measured_start
from hvd_trainer.tools.runner.step_stats import read_steps

REPOSITORY = Path(__file__).resolve().parent.parent


class RunError(RuntimeError):
    """A run gave no valid figure; the message has the reason and the end of its output."""


@dataclass(frozen=True)
class Measurement:
    """One run. ``images_per_s`` is over all ranks; ``startup_s`` is from command to first step."""

    images_per_s: float
    startup_s: float
    exit_code: int


def start_of(contestant: Contestant, ranks: int, data_dir: Path, log_dir: Path) -> Start:
    """The contestant's command under its launcher, with the probe in front of its script."""
    words = [word.format(data=data_dir, log=log_dir) for word in contestant.arguments.split()]
    engine = next(name for name, launcher in LAUNCHER_OF.items() if launcher == contestant.launcher)
    return measured_start(words, engine=engine, ranks=ranks, log=log_dir / "probed", native=True)


def run(contestant: Contestant, ranks: int, data_dir: Path, *, limit_s: float) -> Measurement:
    """Start the contestant with ``ranks`` processes, one CPU thread each, and measure it.

    Raises:
        RunError: it ran into the time limit, or did not do the job's steps in every rank.
    """
    job = contestant.job
    with tempfile.TemporaryDirectory(prefix="hvd-benchmark-") as name:
        folder, steps = Path(name), job.steps(ranks)
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]),
        }
        start = start_of(contestant, ranks, data_dir, folder / "log")
        output = folder / "output"
        started = time.time()
        exit_code = finish(start.command, {**environment, **start.variables}, output, limit_s)
        probed = read_steps(folder / "log" / "probed")
        done = [len(rank["step"]) for rank in probed]
        if done != [steps] * ranks:
            raise RunError(
                f"{contestant.name}: asked for {ranks} ranks of {steps} steps in "
                f"{limit_s:g} s, found {done or 'none'}, exit code {exit_code}; command: "
                f"{' '.join(start.command)}\n{output.read_text(errors='replace')[-4000:]}"
            )
    return Measurement(
        images_per_s=sum(job.timed_samples(ranks) / rank["seconds"][job.warmup :].sum() for rank in probed),
        startup_s=max(float(rank["first_step_at"]) for rank in probed) - started,
        exit_code=exit_code,
    )


def finish(
    command: Sequence[str], environment: dict[str, str], output: Path, limit_s: float, *, gpus: bool = False
) -> int:
    """Run the command to its end or to the limit, leave no process of it; return its exit code.

    Args:
        gpus: let it see the machine's GPUs. The scripts that ours are compared with know CPUs only.
    """
    with output.open("wb") as file:
        process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env=environment if gpus else environment | NO_GPUS,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        pass
    finally:
        # The launchers put their ranks into sessions of their own: a group's signal misses them.
        if process.poll() is None:
            tree = psutil.Process(process.pid)
            for member in [*tree.children(recursive=True), tree]:
                member.kill()
            process.wait()
    return process.returncode
