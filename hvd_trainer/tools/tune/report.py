"""The report of a search: a table, sentences, JSON, and YAML for the job."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import yaml

from hvd_trainer.measure.formats import console, make_table, percent
from hvd_trainer.tools.tune.race import Standing
from hvd_trainer.tools.tune.search import Found, Tried
from hvd_trainer.tools.tune.settings import GROUPS, describe
from hvd_trainer.utils.text import plural

REORDERS = {"threads", "bucket_mb", "num_groups", "autotune"}
"""Options that change the order of sums."""


def show(backend: str, found: Found) -> None:
    """Print the settings that were tried on one engine, and the conclusions."""
    out = console()
    if found.tried:
        title = f"What was tried on {backend}, beside the settings of that moment"
        rows = [(its.label, *_cells(its.standing), _verdict(its)) for its in found.tried]
        out.print(make_table(title, ("", "speed", "95 % interval", "rounds", ""), rows, words=(0, 4)))
    untried = [f"{GROUPS[group]}: not tried; {why}." for group, why in found.untried.items()]
    for text in [*untried, *sentences(backend, found)]:
        out.print(text, markup=False)


def _cells(standing: Standing) -> tuple[str, str, str]:
    if not standing.rounds:
        return "-", "-", "0"
    between = f"{standing.low:.2f} to {standing.high:.2f}" if standing.high < 100 else "-"
    return f"{standing.speed:.2f}", between, str(standing.rounds)


def _verdict(its: Tried) -> str:
    if not its.standing.rounds:
        return "the job fails with it"
    if its.adopted:
        return "adopted"
    words = {"faster": "faster, but another was more so", "no faster": "no faster", "open": "not told from noise"}
    if its.group == "compression":
        words["faster"] = "faster, but rounds the gradients"
    return words[its.standing.verdict]


def sentences(backend: str, found: Found) -> list[str]:
    """Return the conclusions, a sentence each."""
    said = []
    if math.isfinite(found.noise):
        said.append(f"Two runs of {backend} differ by {percent(found.noise)} (standard deviation of their ratio).")
    if found.settings:
        gain = found.gain
        assert gain is not None  # settings that are not proved are dropped
        said.append(
            f"{backend}: {describe(found.settings)} makes the job {gain.value:.2f} times as fast "
            f"({plural(gain.rounds, 'round')} of its own, {gain.interval})."
        )
        if "static_graph" in found.settings:
            said.append("--static-graph promises that every step uses the same parameters: leave it out if not.")
        if REORDERS & set(found.settings):
            said.append("It adds in another order, so that the last bits of the numbers may be others.")
    else:
        said.append(f"{backend}: nothing is faster than the job as it is, for certain.")
    said += [
        f"--compression {kind} would make it {its.standing.speed:.2f} times as fast, but rounds the gradients: "
        f"type --lossy to have it tuned, too."
        for kind, its in found.offers.items()
    ]
    return said


def as_yaml(backend: str, found: Found, own: Mapping[str, Any], command: str, machine: Mapping[str, Any]) -> str:
    """Return the settings as a file for `--config`.

    Args:
        own: the options of the job's own file, which this one repeats.
        command: that found the settings.
        machine: where they were found.
    """
    said = [f"Found by: {command}", "On: " + ", ".join(f"{name} {value}" for name, value in machine.items())]
    said += sentences(backend, found)
    settings = {name: value for name, value in found.settings.items() if value is not None}
    lines = [f"# {line}\n" for line in said]
    return "".join(lines) + yaml.safe_dump({**own, "backend": backend, **settings}, sort_keys=False)


def as_json(everything: Mapping[str, Found], machine: Mapping[str, Any], job: Sequence[str]) -> dict[str, Any]:
    """Return the results of all engines in plain JSON."""
    return {
        "job": list(job),
        "machine": dict(machine),
        "engines": {
            backend: {
                **asdict(found),
                "tried": [{**its._asdict(), "standing": asdict(its.standing)} for its in found.tried],
                "offers": {kind: asdict(its.standing) for kind, its in found.offers.items()},
            }
            for backend, found in everything.items()
        },
    }
