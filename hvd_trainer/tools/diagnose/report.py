"""The report of a diagnosis: tables, sentences and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import msgspec

from hvd_trainer.measure.formats import console, make_table, milliseconds, number
from hvd_trainer.measure.stats import Ratio
from hvd_trainer.tools.diagnose.actions import CAUSES, Action
from hvd_trainer.tools.diagnose.causes import leading
from hvd_trainer.tools.diagnose.evidence import ALONE, NORMAL, SIGMAS, Cause, Evidence
from hvd_trainer.tools.diagnose.switches import Switch, find_switches
from hvd_trainer.utils.text import plural

BAR_LENGTH = 30
"""Length in characters of the bar for a whole step."""
OVERLAPPING = 1.02
"""Sum of the causes' fractions of a step from which it is said that they overlap."""


class Tried(NamedTuple):
    """An action that was tried."""

    action: Action
    ratio: Ratio | None
    """samples per second with it and without it; None if the job did not run"""
    note: str = ""
    """why it did not"""


@dataclass(frozen=True, kw_only=True)
class Report:
    """The results of a diagnosis."""

    evidence: Evidence
    causes: Sequence[Cause]
    advice: Sequence[Action]
    backend: str
    note: str = ""
    """why the diagnosis ended early; empty if it did not"""

    @property
    def switches(self) -> list[Switch]:
        """What is on and slows every step, as far as no cause tells it."""
        told = any(cause.kind == "contention" for cause in self.causes)
        return find_switches(self.evidence, with_threads=not told)


def show(report: Report) -> None:
    """Print the tables and the sentences."""
    out, evidence = console(), report.evidence
    rows = []
    for name, figures in evidence.runs.items():
        step, rate = evidence.figure(name), evidence.figure(name, "samples_per_s")
        shown = milliseconds(step[0]) if step else "", number(rate[0]) if rate else ""
        rows.append((name, *shown, str(len(figures))))
    if rows:
        out.print(make_table("What was run", ("", "ms of a typical step", "samples/s", "runs"), rows))
    parts = [(CAUSES[c.kind].name, c.seconds, SIGMAS * c.error) for c in report.causes]
    rest = evidence.step_s - sum(seconds for _, seconds, _ in parts)
    lost = [
        (text, milliseconds(seconds), f"\u00b1 {milliseconds(error)}", *_bar(seconds / evidence.step_s))
        for text, seconds, error in [*parts, ("the rest: computing the samples", max(rest, 0.0), 0.0)]
    ]
    columns = ("", "ms", "95 %", "of a step", "")
    out.print(make_table("What a step's time goes to", columns, lost, words=(0, 4)))
    for text in sentences(report):
        out.print(text, markup=False)


def _bar(share: float) -> tuple[str, str]:
    return f"{share:.0%}", "#" * round(BAR_LENGTH * max(share, 0))


def sentences(report: Report) -> list[str]:
    """Return the conclusions, a sentence each."""
    evidence, said = report.evidence, []
    if report.note:
        said.append(f"{report.note} What follows is from the runs until then.")
    normal, alone = evidence.figure(NORMAL), evidence.figure(ALONE)
    if normal and alone:
        said.append(
            f"A rank is at {alone[0] / normal[0]:.0%} of the speed that one rank has alone ({evidence.ranks} "
            f"ranks on {report.backend})."
        )
    for switch in report.switches:
        at = f"{switch.where}: " if switch.where else ""
        said.append(f"On in every step: {at}{switch.text}")
    if not report.causes:
        if report.switches:
            return said
        return [*said, "Nothing takes more than a twentieth of a step but computing: there is little to gain."]
    for cause in report.causes:
        said.append(
            f"{CAUSES[cause.kind].name}, {cause.seconds / evidence.step_s:.0%} of a step: {cause.evidence}"
        )
    said[-len(report.causes)] = f"The largest loss: {said[-len(report.causes)]}"
    share = sum(cause.seconds for cause in report.causes) / evidence.step_s
    if share > OVERLAPPING:
        said.append(
            f"Together that is {share:.0%} of a step, since some of it goes on at the same time, on several "
            f"ranks: to mend one cause may gain less than its share."
        )
    for cause in leading(report.causes):
        if all(action.cause != cause.kind for action in report.advice):
            said.append(f"Nothing is known that makes this cheaper: {CAUSES[cause.kind].name}.")
    for place, action in enumerate(report.advice, 1):
        gain = f" (expected: {action.speed:.2f} times the samples/s, {action.low:.2f} to {action.high:.2f})"
        said.append(f"{place}. {action.text}{gain if action.speed > 1 else ''}")
    return said


def describe_tried(tried: Tried) -> str:
    """Return a sentence about an action that was tried."""
    what, its = f"tried {tried.action.title}", tried.ratio
    if its is None:
        return f"{what}: {tried.note}"
    verdict = "not told from noise" if not its.is_clear else "proved" if its.value > 1 else "it makes it slower"
    return (
        f"{what}: {its.value:.2f} times the samples/s ({its.interval}, {plural(its.rounds, 'round')}; "
        f"expected {tried.action.speed:.2f}): {verdict}"
    )


def as_json(report: Report, tried: Sequence[Tried]) -> dict[str, Any]:
    """Return the report in plain JSON."""
    evidence = report.evidence
    made: dict[str, Any] = msgspec.to_builtins(
        {
            "backend": report.backend,
            "ranks": evidence.ranks,
            "facts": dict(evidence.facts),
            "step_s": evidence.step_s,
            "runs": {name: list(runs) for name, runs in evidence.runs.items()},
            "machine": asdict(evidence.machine) | {"cores": evidence.cores},
            "exchange": None if evidence.line is None else asdict(evidence.line),
            "causes": [
                {"name": CAUSES[its.kind].name, "share": its.seconds / evidence.step_s, **asdict(its)}
                for its in report.causes
            ],
            "switches": [switch._asdict() for switch in report.switches],
            "advice": [asdict(action) for action in report.advice],
            "note": report.note,
            "tried": [its._asdict() for its in tried],
        }
    )
    return made
