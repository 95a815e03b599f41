"""The report of a search, and its settings as YAML for the job's --config."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import yaml

from hvd_trainer.config.options import TrainerOptions
from hvd_trainer.measure.command import LAUNCHER_OF, with_options
from hvd_trainer.measure.formats import percent
from hvd_trainer.measure.machine import Ran, as_text
from hvd_trainer.measure.report import Report, Table, Verdict
from hvd_trainer.measure.stats import METHOD
from hvd_trainer.tools.compare.search import SearchResult, TriedChange
from hvd_trainer.tools.compare.settings import GROUPS, as_words, describe
from hvd_trainer.tools.compare.settings_runner import SearchJob
from hvd_trainer.utils.text import COMMAND, plural

REORDERS = {"threads", "bucket_mb"}
"""Options that change the order of sums."""
OUTCOMES = {"faster": "faster, but another was more so", "no faster": "no faster", "open": "not told from noise"}


def write(
    results: Mapping[str, SearchResult],
    job: SearchJob,
    folder: Path,
    *,
    machine: Mapping[str, Any],
    warnings: Sequence[str],
    ran: Ran,
) -> None:
    """Print the report, and write all files.

    Args:
        results: of each engine.
        job: that was run.
        folder: of the tool.
        machine: where it was run.
        warnings: what was warned of meanwhile.
        ran: when and by which command.
    """
    files = []
    for backend, result in results.items() if not job.is_script and job.reads_options else ():
        files.append(folder / f"{backend}.yaml")
        files[-1].write_text(as_yaml(backend, result, job.own, ran.command, machine))
    report = Report(
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
        data=data_of(results, machine, job.words),
    )
    report.show()
    report.write(folder, "search", files)


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
    rows = [(tried.label, *_cells(tried), _outcome(tried)) for tried in result.tried]
    return Table(title, ("", "speed", "interval", "level", "rounds", ""), rows, words=(0, 5))


def _cells(tried: TriedChange) -> tuple[str, str, str, str]:
    standing = tried.standing
    if not standing.rounds:
        return "-", "-", "-", "0"
    between = f"{standing.low:.2f} to {standing.high:.2f}" if standing.high < 100 else "-"
    return f"{standing.speed:.2f}", between, f"{100 * standing.level:.3g} %", str(standing.rounds)


def _outcome(tried: TriedChange) -> str:
    if not tried.standing.rounds:
        return "the job fails with it"
    if tried.adopted:
        return "adopted"
    return OUTCOMES[tried.standing.verdict]


def notes(backend: str, result: SearchResult) -> list[str]:
    """Return what was not tried on one engine, and its noise."""
    said = [f"{backend}, {GROUPS[group]}: not tried; {why}." for group, why in result.untried.items()]
    if math.isfinite(result.noise):
        said.append(
            f"Two runs of {backend} differ by {percent(result.noise)} (standard deviation of their ratio)."
        )
    return said


def line_of(job: SearchJob, backend: str, result: SearchResult, folder: Path) -> str:
    """Return the command line that starts the job with what was found."""
    if job.is_script:
        run = [*COMMAND.split(), "run", "--np", str(job.ranks), "--backend", backend, *as_words(result.settings)]
        return shlex.join([*run, "--", *job.words])
    launcher = {
        "horovodrun": f"horovodrun -np {job.ranks} python",
        "torchrun": f"torchrun --nproc-per-node {job.ranks}",
    }
    words = with_options(job.words, ["--config", str(folder / f"{backend}.yaml")])
    return f"{launcher[LAUNCHER_OF[backend]]} {shlex.join(words)}"


def in_code(backend: str, settings: Mapping[str, Any]) -> str:
    """Return the settings as they stand in the code of a job that reads no options."""
    chosen = {"backend": backend, **settings}
    groups = []
    for group in fields(TrainerOptions):
        kind: Any = group.default_factory
        own = [f"{entry.name}={chosen[entry.name]!r}" for entry in fields(kind) if entry.name in chosen]
        groups += [f"{group.name}={kind.__name__}({', '.join(own)})"] if own else []
    return f"TrainerOptions({', '.join(groups)})  # the job reads no options: write these into its code"


def as_yaml(
    backend: str, result: SearchResult, own: Mapping[str, Any], command: str, machine: Mapping[str, Any]
) -> str:
    """Return the settings as a file for `--config`.

    Args:
        backend: the engine.
        result: of its search.
        own: the options of the job's own file, which this one repeats.
        command: that found the settings.
        machine: where they were found.
    """
    said = [f"Found by: {command}", f"On: {as_text(machine)}"]
    concluded = verdict(backend, result)
    said += [*notes(backend, result), concluded.text, *concluded.details]
    lines = [f"# {line}\n" for line in said]
    return "".join(lines) + yaml.safe_dump({**own, "backend": backend, **result.settings}, sort_keys=False)


def data_of(results: Mapping[str, SearchResult], machine: Mapping[str, Any], job: Sequence[str]) -> dict[str, Any]:
    """Return the results of all engines in plain JSON."""
    return {
        "job": list(job),
        "machine": dict(machine),
        "backends": {
            backend: {
                **asdict(result),
                "tried": [{**tried._asdict(), "standing": asdict(tried.standing)} for tried in result.tried],
            }
            for backend, result in results.items()
        },
    }
