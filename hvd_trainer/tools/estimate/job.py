"""Describe the job to estimate: a published one, one given by its figures, or one that `compare` has measured."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, mode

import msgspec
from msgspec import Struct

from hvd_trainer.errors import OptionError
from hvd_trainer.measure.formats import milliseconds, number
from hvd_trainer.tools.estimate.points import Count, Measured, Positive, published_series
from hvd_trainer.utils.text import COMMAND

ENGINES = ("horovod", "ddp")


class CannotKnowError(Exception):
    """An answer that does not follow from the points; the text has the reasons, a line each."""


@dataclass(frozen=True)
class Job:
    """One pass of one rank: forward and backward through a batch."""

    name: str
    pass_s: Mapping[str, float]
    """time of a pass of a rank alone, by engine"""
    batch_size: int | None
    """None: unknown"""
    gradient_mb: float
    """size of fp32 gradients"""
    device: str
    """gpu or cpu"""
    spread: float | None = None
    """standard deviation of a step, divided by its time; None: not measured"""

    def describe(self) -> str:
        """Describe the job in one line."""
        times = sorted({milliseconds(seconds) for seconds in self.pass_s.values()})
        batch = "" if self.batch_size is None else f", batch {self.batch_size}"
        spread = "" if self.spread is None else f", which vary by {self.spread:.1%}"
        return (
            f"{self.name}{batch}: {' and '.join(times)} ms per pass of one rank alone{spread}, "
            f"{number(self.gradient_mb)} MB of gradients"
        )


def reference_job(device: str, measured: Measured) -> Job:
    """Return the job of the points: on GPUs DLPerf's ResNet-50 by pytorch/examples, else the measured one."""
    if device == "gpu":
        (its,) = (series for series in published_series() if series.code == "pytorch/examples")
        name = f"ResNet-50 as published (DLPerf: {its.alone:g} images/s on one V100)"
        return Job(name, dict.fromkeys(ENGINES, its.compute_s), its.batch_size, its.gradient_mb, "gpu")
    pass_s = median(point.setup.compute_s / point.setup.passes for point in measured.points)
    name = f"the job that was measured ({measured.machine})"
    batch_size = mode(entry.batch_size for entry in measured.entries)
    gradient_mb = mode(entry.gradient_mb for entry in measured.entries)
    return Job(name, dict.fromkeys(ENGINES, pass_s), batch_size, gradient_mb, "cpu")


class Work(Struct):
    """The work of a run, as far as it is used here; a script does not tell its passes per exchange."""

    parameters: Count
    device: str
    passes: Count = 1
    batch_size: int | None = None
    global_batch_size: int | None = None


class Figures(Struct):
    """The figures of a run, as far as they are used here."""

    work: Work
    step_p50_s: Positive
    step_p95_s: Positive


def job_from_comparison(file: Path) -> Job:
    """Read the job that `compare` has measured from its runs on one rank.

    Raises:
        OptionError: the file is something else, or has no run on one rank.
    """
    wanted = f"type one that `{COMMAND} compare` has written, such as runs/compare/comparison.json"
    try:
        content = json.loads(file.read_text())
        if content.get("varied"):
            raise OptionError(
                f"--from {file} has several values of options: measure the job that is meant alone, without --vary"
            )
        runs = [run for run in content["runs"] if run["state"] == "done" and "device" in run["figures"]["work"]]
        alone = [run for run in runs if run["identity"]["ranks"] == 1]
        if not alone:
            raise OptionError(
                f"--from {file} has no run on one rank, with which all others are compared: measure it with "
                f"`{COMMAND} compare --np 1,2 -- ...`"
            )
        figures = [(run["identity"]["engine"], msgspec.convert(run["figures"], Figures)) for run in alone]
        return _job_from_runs(" ".join(content["job"]), figures)
    except OSError as error:
        raise OptionError(f"--from {file} cannot be read ({error.strerror}): {wanted}") from None
    except (ValueError, KeyError, TypeError, msgspec.ValidationError) as error:
        raise OptionError(f"--from {file} is no comparison ({error!r}): {wanted}") from None


def _job_from_runs(name: str, alone: Sequence[tuple[str, Figures]]) -> Job:
    every = [figures for _, figures in alone]
    work = every[0].work
    seconds = {}
    for engine in ENGINES:
        its = [figures for its_engine, figures in alone if its_engine == engine]
        seconds[engine] = median(figures.step_p50_s for figures in its or every) / work.passes
    # 95 of 100 steps of a normal distribution are below its mean and 1.645 standard deviations.
    spread = max(0.0, median((figures.step_p95_s / figures.step_p50_s - 1) / 1.645 for figures in every))
    # On one rank its batch is the global one.
    batch_size = work.global_batch_size if work.batch_size is None else work.batch_size
    device = "cpu" if work.device == "cpu" else "gpu"
    return Job(name, seconds, batch_size, work.parameters * 4 / 2**20, device, spread)
