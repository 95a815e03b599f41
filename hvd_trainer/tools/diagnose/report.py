"""The report of a diagnosis: tables, sentences and JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from hvd_trainer.tools.diagnose.actions import Action
from hvd_trainer.tools.diagnose.causes import ALONE, CAUSES, NORMAL, SIGMAS, Cause, Evidence
from hvd_trainer.tools.runner.formats import console, make_table, milliseconds, number

BAR_LENGTH = 30
"""Length in characters of the bar for a whole step."""
Tried = Sequence[tuple[Action, float, float]]


@dataclass(frozen=True, kw_only=True)
class Report:
    """The results of a diagnosis."""

    evidence: Evidence
    causes: Sequence[Cause]
    advice: Sequence[Action]
    backend: str
    note: str = ""
    """why the diagnosis ended early; empty if it did not"""


def show(report: Report) -> None:
    """Print the tables and the sentences."""
    out, evidence = console(), report.evidence
    rows = []
    for name, figures in evidence.runs.items():
        step, rate = evidence.figure(name), evidence.figure(name, "samples_per_s")
        shown = milliseconds(step[0]) if step else "", number(rate[0]) if rate else ""
        rows.append((name, *shown, str(len(figures))))
    if rows:
        out.print(make_table("What was run", ("", "ms per step", "samples/s", "runs"), rows))
    parts = [(CAUSES[c.kind], c.seconds, SIGMAS * c.error) for c in report.causes]
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
    if not report.causes:
        return [*said, "Nothing takes more than a twentieth of a step but computing: there is little to gain."]
    for cause in report.causes:
        said.append(f"{CAUSES[cause.kind]}, {cause.seconds / evidence.step_s:.0%} of a step: {cause.evidence}")
    said[-len(report.causes)] = f"The largest loss: {said[-len(report.causes)]}"
    for place, action in enumerate(report.advice, 1):
        is_known = action.speed > 1
        gain = (
            f" (expected: {action.speed:.2f} times the samples/s, {action.low:.2f} to {action.high:.2f})"
            if is_known
            else ""
        )
        said.append(f"{place}. {action.text}{gain}")
    return said


def show_tried(tried: Tried) -> None:
    """Print the speeds before and after each action that was tried."""
    for action, before, after in tried:
        what = action.text.partition(":")[0]
        print(
            f"tried {what}: {number(before)} samples/s before, {number(after)} after, {after / before:.2f} times "
            f"(expected {action.speed:.2f})"
        )


def as_json(report: Report, tried: Tried) -> dict[str, Any]:
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
            "causes": [_cause_as_json(cause, evidence) for cause in report.causes],
            "advice": [asdict(action) for action in report.advice],
            "note": report.note,
            "tried": [
                {"action": asdict(action), "before": before, "after": after} for action, before, after in tried
            ],
        }
    )
    return made


def _cause_as_json(cause: Cause, evidence: Evidence) -> Mapping[str, Any]:
    return {
        "kind": cause.kind,
        "name": CAUSES[cause.kind],
        "seconds": cause.seconds,
        "error": cause.error,
        "share": cause.seconds / evidence.step_s,
        "rank": cause.rank,
        "evidence": cause.evidence,
        "line": cause.where,
    }
