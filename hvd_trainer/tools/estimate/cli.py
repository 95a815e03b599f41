"""Run `python -m hvd_trainer estimate`: how fast a job would be on hosts that are not here, with an interval.

python -m hvd_trainer estimate --hosts 64 --gpus-per-host 8 --link-gbit 100

Nothing is started or measured. A formula of a step's costs, fitted to published tables (GPUs) or to steps that
were timed here (CPUs), gives an efficiency with an interval, beside the plain linear guess; where neither covers
the set-up, it says that it cannot know.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Annotated, Literal

import tyro
from annotated_types import Ge, Gt

from hvd_trainer.config.checks import collect_errors, flag, range_errors, refuse
from hvd_trainer.config.command_line import read_words
from hvd_trainer.errors import OptionError
from hvd_trainer.measure.formats import check_installed
from hvd_trainer.tools.estimate.fit import LATENCY_US
from hvd_trainer.tools.estimate.held_out import run_trials
from hvd_trainer.tools.estimate.job import (
    ENGINES,
    CannotKnowError,
    Job,
    job_from_comparison,
    reference_job,
)
from hvd_trainer.tools.estimate.model import Setup
from hvd_trainer.tools.estimate.points import SENT_FRACTION, SHIPPED_FILE, Measured, count_pieces, read_points
from hvd_trainer.tools.estimate.projection import measured_basis, project_rows, published_basis
from hvd_trainer.tools.estimate.report import CANNOT_KNOW, Report, as_json, print_report
from hvd_trainer.utils.text import COMMAND


@dataclass(frozen=True)
class Options:
    """Estimate how a job scales on hosts that are not here: efficiency with an interval, or why it is unknown.

    The job is ResNet-50 as published, unless its figures are given, or --from a comparison.
    """

    hosts: Annotated[int, Ge(1)]
    """hosts"""
    gpus_per_host: Annotated[int, Ge(1)]
    """ranks on each of them: GPUs, or with --device cpu processes"""
    link_gbit: Annotated[float | None, Gt(0)] = None
    """each host's link to the others, Gbit/s"""
    latency_us: Annotated[float | None, Gt(0)] = None
    """of a message between two hosts, one way; None: as fitted, which begins with 10, NCCL's own figure"""
    engine: Literal["both", "horovod", "ddp"] = "both"
    """horovod, ddp or both"""
    images_per_s: Annotated[float | None, Gt(0)] = None
    """samples per second of one rank alone; needs --batch-size"""
    step_ms: Annotated[float | None, Gt(0)] = None
    """the same as the time of one pass (forward, backward, update) of one rank alone"""
    batch_size: Annotated[int | None, Ge(1)] = None
    """samples of a pass of one rank"""
    parameters_mb: Annotated[float | None, Gt(0)] = None
    """of the model in fp32, 4 bytes each (1 MB = 2^20 bytes)"""
    from_: Annotated[Path | None, tyro.conf.arg(name="from", metavar="FILE")] = None
    """comparison.json of `compare`: the job, its time on one rank and how much its steps vary are taken from it"""
    compression: Literal["none", "fp16", "bf16", "powersgd"] = "none"
    """of gradients, on the way"""
    accumulation: Annotated[int, Ge(1)] = 1
    """passes for one exchange"""
    device: Literal["gpu", "cpu"] | None = None
    """what ranks compute on; None: as --from says, else gpu"""
    fit: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """steps that `python -m benchmarks.slow_link` has timed; None: those that come with the package"""
    json: bool = False
    """one JSON document instead of text"""

    def check(self) -> None:
        """Refuse invalid values, with all mistakes in one error.

        Raises:
            OptionError: an option is out of its range, or two options say the same.
        """
        figures = ("images_per_s", "step_ms", "parameters_mb", "batch_size")
        given = [flag(name) for name in figures if getattr(self, name) is not None]
        twice = f"--from has the job's figures already: leave out {' and '.join(given)}"
        mistakes = collect_errors(
            ({"--images-per-s", "--step-ms"} <= set(given), "--images-per-s and --step-ms say the same: type one"),
            (self.from_ is not None and bool(given), twice),
        )
        refuse([*range_errors(self), *mistakes])


def main(argv: Sequence[str]) -> int:
    """Print the estimate and return the exit code: 0 if an engine's efficiency is known, 1 if none is.

    Raises:
        OptionError: an option is out of its range, or a file has another form.
    """
    options = read_words(Options, argv, program=f"{COMMAND} estimate")
    options.check()
    check_installed()
    measured = read_points(options.fit or SHIPPED_FILE)
    try:
        report = estimate(options, measured)
    except CannotKnowError as error:
        for line in str(error).splitlines():
            print(f"{CANNOT_KNOW}: {line}")
        return 1
    if options.json:
        print(as_json(report))
    else:
        print_report(report)
    return int(not any(row.is_known for row in report.asked))


def estimate(options: Options, measured: Measured) -> Report:
    """Estimate the job on the hosts in question, on each engine.

    Raises:
        CannotKnowError: nothing can be known.
    """
    job = select_job(options, measured)
    reasons = find_reasons(options, job, measured)
    if reasons:
        raise CannotKnowError("\n".join(reasons))
    asked = Setup(
        options.hosts,
        options.gpus_per_host,
        inf if options.link_gbit is None else options.link_gbit,
        max(job.pass_s.values()) * options.accumulation,
        job.gradient_mb * 2**20 * SENT_FRACTION[options.compression],
        count_pieces(job.gradient_mb),
        options.accumulation,
        trees=job.device == "gpu",
    )
    engines = ENGINES if options.engine == "both" else (options.engine,)
    uses_measured = job.device == measured.device
    every = (measured_basis(e, measured) if uses_measured else published_basis(e) for e in engines)
    bases = [basis.with_known(options.latency_us, job.spread) for basis in every if basis is not None]
    if not bases:
        raise CannotKnowError(
            f"{options.fit or SHIPPED_FILE} has no points of {' and '.join(engines)} on several hosts: measure "
            f"some with `python -m benchmarks.slow_link`"
        )
    found = [row for basis in bases for row in project_rows(job, basis, asked)]
    said = describe_conditions(options, uses_measured)
    return Report(job, said, bases, found, run_trials(engines, measured), measured.describe())


def select_job(options: Options, measured: Measured) -> Job:
    """Return the job that the options describe.

    Raises:
        CannotKnowError: some of its figures are missing.
        OptionError: --device contradicts --from.
    """
    if options.from_ is not None:
        job = job_from_comparison(options.from_)
        if options.device not in (None, job.device):
            raise OptionError(
                f"--device {options.device}: {options.from_} was measured on a {job.device}, whose steps say "
                f"nothing about a {options.device}: leave out --device, or compare there"
            )
        return job
    if any(value is not None for value in (options.images_per_s, options.step_ms, options.parameters_mb)):
        return job_from_figures(options)
    job = reference_job(options.device or "gpu", measured)
    if options.batch_size not in (None, job.batch_size):
        raise CannotKnowError(
            f"how fast {job.name} is at batch {options.batch_size}; it is known at {job.batch_size}: type "
            f"--step-ms or --images-per-s, and --parameters-mb"
        )
    return job


def job_from_figures(options: Options) -> Job:
    """Build a job from the figures that were given.

    Raises:
        CannotKnowError: a figure is missing that the others do not replace.
    """
    missing, seconds, batch_size = [], 0.0, options.batch_size
    if options.step_ms is not None:
        seconds = options.step_ms / 1000
    elif options.images_per_s is None:
        missing.append("how long a rank alone takes for such a batch: type --step-ms or --images-per-s")
    elif batch_size is None:
        missing.append(f"how long a pass takes at {options.images_per_s:g} images/s: type --batch-size")
    else:
        seconds = batch_size / options.images_per_s
    if options.parameters_mb is None:
        missing.append("how many bytes are exchanged: type --parameters-mb, 4 bytes for each parameter")
    if missing or options.parameters_mb is None:
        raise CannotKnowError("\n".join(missing))
    times = dict.fromkeys(ENGINES, seconds)
    return Job("a job of your own", times, batch_size, options.parameters_mb, options.device or "gpu")


def find_reasons(options: Options, job: Job, measured: Measured) -> list[str]:
    """Return the reasons why nothing can be known, on any engine; empty if there are none."""
    return collect_errors(
        (
            options.hosts > 1 and options.link_gbit is None,
            f"how fast {options.hosts} hosts reach each other: type --link-gbit",
        ),
        (
            options.compression == "powersgd",
            "what PowerSGD sends depends on the shapes of the model's tensors, and the loss that it gives on so "
            "many ranks on the data: measure both, with --compression powersgd behind `compare ... --`",
        ),
        (
            job.device == "cpu" and measured.device != "cpu",
            f"--fit {options.fit} was measured on a {measured.device}, the job computes on a cpu: leave out --fit",
        ),
    )


def describe_conditions(options: Options, uses_measured: bool) -> list[str]:
    """Return the conditions under which the figures hold, a sentence each."""
    link = f"{options.link_gbit:g} Gbit/s" if options.link_gbit is not None else "one host"
    latency = "as fitted" if uses_measured else f"as fitted (beforehand {LATENCY_US:g} us, NCCL's own figure)"
    if options.latency_us is not None:
        latency = f"{options.latency_us:g} us"
    costs = "steps that were timed" if uses_measured else "published tables, since no GPU was measured here"
    found = [f"Link: {link}; latency {latency}. Costs: fitted to {costs}."]
    if options.compression != "none" and not uses_measured:
        found.append(f"{options.compression} halves the bytes: no published table has that, the formula says it.")
    if options.accumulation > 1 and not uses_measured:
        found.append(f"{options.accumulation} passes for one exchange: no published table has several.")
    return found
