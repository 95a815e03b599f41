"""The report of a search, and its settings as YAML for the job's --config."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import yaml

from hvd_trainer.config.options import TrainerOptions
from hvd_trainer.measure.command import launcher_of, option_values, with_options
from hvd_trainer.measure.formats import percent
from hvd_trainer.measure.machine import Ran, as_text
from hvd_trainer.measure.report import Report, Table, Verdict
from hvd_trainer.measure.stats import METHOD
from hvd_trainer.tools.compare.search import SearchResult, TriedChange
from hvd_trainer.tools.compare.search_job import SearchJob
from hvd_trainer.tools.compare.settings import GROUPS, as_words, describe
from hvd_trainer.utils.text import COMMAND, plural

REORDERS = {"threads", "bucket_mb"}
"""Options that change the order of sums."""
OUTCOMES = {"faster": "faster, but another was more so", "no faster": "no faster", "open": "not told from noise"}


def conclude(
    results: Mapping[str, SearchResult],
    job: SearchJob,
    folder: Path,
    *,
    machine: Mapping[str, Any],
    warnings: Sequence[str],
    ran: Ran,
) -> Report:
    """Return all that a search has to say.

    Args:
        results: of each engine.
        job: that was run.
        folder: of the tool, with the files of `write_settings`.
        machine: where it was run.
        warnings: what was warned of meanwhile.
        ran: when and by which command.
    """
    engines = {
        backend: {
            **asdict(result),
            "tried": [{**tried._asdict(), "standing": asdict(tried.standing)} for tried in result.tried],
        }
        for backend, result in results.items()
    }
    return Report(
        ran=ran,
        verdicts=[verdict(backend, result) for backend, result in results.items()],
        warnings=warnings,
        tables=[table(backend, result) for backend, result in results.items() if result.tried],
        notes=[
            *(note for backend, result in results.items() for note in notes(backend, result)),
            f"{METHOD}; while searching, with the variance of all candidates pooled, and with Bonferroni's "
            f"correction for their number.",
            f"Machine: {as_text(machine)}.",
        ],
        advice=[
            line_of(job, backend, result, folder) if job.reads_options else in_code(backend, result.settings)
            for backend, result in results.items()
            if result.settings
        ],
        data={"job": job.words, "machine": machine, "backends": engines},
    )


def verdict(backend: str, result: SearchResult) -> Verdict:
    """Return the conclusion on one engine."""
    gain = result.gain
    if not result.settings or gain is None:
        text = f"{backend}: nothing is faster than the job as it is, for certain."
        return Verdict(text, "unsure", badge="NOTHING FASTER")
    details = []
    if REORDERS & set(result.settings):
        details.append("It adds in another order, so that the last bits of the numbers may be others.")
    text = (
        f"{backend}: {describe(result.settings)} makes the job {gain.value:.2f} times as fast "
        f"({plural(gain.rounds, 'fresh round')}, {gain.interval})."
    )
    return Verdict(text, "sure", details, badge=gain.badge, ratio=gain)


def table(backend: str, result: SearchResult) -> Table:
    """Return the settings that were tried on one engine."""
    title = f"What was tried on {backend}, beside the settings of that moment"
    rows = [(tried.label, *_cells(tried)) for tried in result.tried]
    return Table(title, ("", "speed", "interval", "level", "rounds", ""), rows, words=(0, 5))


def _cells(tried: TriedChange) -> tuple[str, ...]:
    standing = tried.standing
    if not standing.rounds:
        return "-", "-", "-", "0", "the job fails with it"
    between = f"{standing.low:.2f} to {standing.high:.2f}" if standing.high < 100 else "-"
    outcome = "adopted" if tried.adopted else OUTCOMES[standing.verdict]
    return f"{standing.speed:.2f}", between, f"{100 * standing.level:.3g} %", str(standing.rounds), outcome


def notes(backend: str, result: SearchResult) -> Iterator[str]:
    """Yield what was not tried on one engine, and its noise."""
    for group, why in result.untried.items():
        yield f"{backend}, {GROUPS[group]}: not tried; {why}."
    if math.isfinite(result.noise):
        yield f"Two runs of {backend} differ by {percent(result.noise)} (standard deviation of their ratio)."


def line_of(job: SearchJob, backend: str, result: SearchResult, folder: Path) -> str:
    """Return the command line that starts the job with what was found."""
    if job.is_script:
        run = [*COMMAND.split(), "run", "--np", str(job.ranks), "--backend", backend, *as_words(result.settings)]
        return shlex.join([*run, "--", *job.words])
    own = [("--backend", backend)] if option_values(job.words, "--backend") else []  # it wins over the file
    words = with_options(job.words, [*own, ("--config", str(folder / f"{backend}.yaml"))])
    launcher = launcher_of(backend, job.words)
    size = "--nproc-per-node" if launcher == "torchrun" else "-np"
    python = [] if launcher == "torchrun" else ["python"]
    return shlex.join([launcher, size, str(job.ranks), *python, *words])


def in_code(backend: str, settings: Mapping[str, Any]) -> str:
    """Return the settings as they stand in the code of a job that reads no options."""
    chosen = {"backend": backend, **settings}
    groups = []
    for group in fields(TrainerOptions):
        kind: Any = group.default_factory
        own = [f"{entry.name}={chosen[entry.name]!r}" for entry in fields(kind) if entry.name in chosen]
        groups += [f"{group.name}={kind.__name__}({', '.join(own)})"] if own else []
    return f"TrainerOptions({', '.join(groups)})  # the job reads no options: write these into its code"


def write_settings(
    results: Mapping[str, SearchResult], job: SearchJob, folder: Path, machine: Mapping[str, Any], command: str
) -> list[Path]:
    """Write the settings of each engine as a file for `--config`, and return the paths; none for other jobs.

    Args:
        command: that found the settings.
    """
    files = []
    for backend, result in results.items() if not job.is_script and job.reads_options else ():
        said = [f"Found by: {command}", f"On: {as_text(machine)}", *notes(backend, result)]
        concluded = verdict(backend, result)
        said += [concluded.text, *concluded.details]
        # The options of the job's own file, which this one replaces.
        options = {**job.own, "backend": backend, **result.settings}
        files.append(folder / f"{backend}.yaml")
        files[-1].write_text("".join(f"# {line}\n" for line in said) + yaml.safe_dump(options, sort_keys=False))
    return files
