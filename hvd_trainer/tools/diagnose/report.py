"""The report of a diagnosis: a verdict about each cause, with what to do, then what was run, and flame graphs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import msgspec

from hvd_trainer.measure.formats import milliseconds, number
from hvd_trainer.measure.report import Report, Table, Verdict
from hvd_trainer.measure.stats import Ratio
from hvd_trainer.tools.diagnose.actions import CAUSES, Action
from hvd_trainer.tools.diagnose.causes import OF_THE_MACHINE, leading
from hvd_trainer.tools.diagnose.evidence import ALONE, NO_EXCHANGE, NORMAL, SIGMAS, Cause, Evidence, ms
from hvd_trainer.tools.diagnose.flame_graph import draw
from hvd_trainer.tools.diagnose.switches import Switch, find_switches
from hvd_trainer.utils.text import plural

OVERLAPPING = 1.02
"""Sum of the causes' fractions of a step from which it is said that they overlap."""


class Tried(NamedTuple):
    """An action that was tried."""

    action: Action
    ratio: Ratio | None
    """samples per second with it and without it; None if the job did not run"""
    note: str = ""
    """why it did not"""

    def __str__(self) -> str:
        what, gain = f"Tried {self.action.title}", self.ratio
        if gain is None:
            return f"{what}: {self.note}"
        verdict = "that is within the noise"
        if gain.is_clear:
            verdict = "proved" if gain.value > 1 else "it makes the job slower"
        return (
            f"{what}: {gain.value:.2f} times the samples/s ({gain.interval}, {plural(gain.rounds, 'round')}; "
            f"expected {self.action.speed:.2f}): {verdict}."
        )


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What a diagnosis has come to."""

    subject: str
    """ranks, engine and job"""
    evidence: Evidence
    causes: Sequence[Cause]
    """the largest first"""
    unclear: Sequence[Cause]
    """those within the noise"""
    actions: Sequence[Action]
    tried: list[Tried] = field(default_factory=list)
    failure: str = ""
    """why the job has failed as it is; empty if it has not"""
    warnings: Sequence[str] = ()
    again: Sequence[str] = ()
    """what to type for the actions to be tried"""

    @property
    def switches(self) -> list[Switch]:
        """What is on and slows every step, as far as no cause tells it."""
        told = any(cause.kind == "contention" for cause in self.causes)
        return list(find_switches(self.evidence, with_threads=not told))


def conclude(diagnosis: Diagnosis) -> Report:
    """Return all that a diagnosis has to say."""
    return Report(
        title="Diagnosed",
        subject=diagnosis.subject,
        verdicts=[*_verdicts(diagnosis)],
        warnings=[*diagnosis.warnings, *_warnings(diagnosis.evidence)],
        tables=[*_tables(diagnosis)],
        pictures=[*draw(diagnosis.evidence.profiles)],
        notes=[*_notes(diagnosis)],
        advice=diagnosis.again,
        data=_data(diagnosis),
    )


def _verdicts(diagnosis: Diagnosis) -> Iterator[Verdict]:
    evidence, causes, switches = diagnosis.evidence, diagnosis.causes, diagnosis.switches
    if diagnosis.failure:
        yield Verdict(diagnosis.failure, "failed", ["What follows is from its steps until then."])
    for switch in switches:
        at = f"{switch.where}: " if switch.where else ""
        yield Verdict(f"On in every step: {at}{switch.text}.", "sure")
    for cause in causes:
        place = "The largest loss" if cause is causes[0] else "A loss"
        text = f"{place}: {CAUSES[cause.kind].name}, {cause.seconds / evidence.step_s:.0%} of a step."
        shown = cause.evidence[:1].upper() + cause.evidence[1:]
        yield Verdict(text, "sure", [f"{shown}.", *_to_do(cause, diagnosis)])
    if diagnosis.unclear and all(cause.kind in OF_THE_MACHINE for cause in causes):
        within = ", ".join(
            f"{CAUSES[cause.kind].name} ({ms(cause.seconds)} {_error(cause)})" for cause in diagnosis.unclear
        )
        more = "More runs (--budget-s), on a quiet machine, would tell."
        yield Verdict(f"Within the noise, in ms of a step: {within}.", details=[more])
    elif not (causes or switches):
        yield Verdict("Nothing takes more than a twentieth of a step but computing: there is little to gain.")


def _to_do(cause: Cause, diagnosis: Diagnosis) -> Iterator[str]:
    actions = [action for action in diagnosis.actions if action.cause == cause.kind]
    for action in actions:
        gain = f" (expected: {action.speed:.2f} times the samples/s, {action.low:.2f} to {action.high:.2f})"
        yield f"To do: {action.text}{gain if action.speed > 1 else ''}."
        yield from (str(tried) for tried in diagnosis.tried if tried.action is action)
    if not actions and cause in leading(diagnosis.causes):
        yield "Nothing is known that makes this cheaper."


def _error(cause: Cause) -> str:
    return f"\u00b1 {ms(SIGMAS * cause.error)}"


def _warnings(evidence: Evidence) -> Iterator[str]:
    figure = evidence.figure(NORMAL)
    if NO_EXCHANGE in evidence.runs and figure is not None and figure[1] == float("inf"):
        yield (
            "each kind of run was made once, so that nothing is concluded from their differences: more --budget-s "
            "allows more runs"
        )


def _tables(diagnosis: Diagnosis) -> Iterator[Table]:
    evidence = diagnosis.evidence
    rest = max(0.0, evidence.step_s - sum(cause.seconds for cause in diagnosis.causes))
    lost = [
        (CAUSES[cause.kind].name, ms(cause.seconds), _error(cause), f"{cause.seconds / evidence.step_s:.0%}")
        for cause in diagnosis.causes
    ]
    lost.append(("the rest: computing the samples", ms(rest), "", f"{rest / evidence.step_s:.0%}"))
    yield Table("What a step's time goes to", ("", "ms", "95 %", "of a step"), lost)
    rows = []
    for name, figures in evidence.runs.items():
        step, rate = evidence.figure(name), evidence.figure(name, "samples_per_s")
        shown = milliseconds(step[0]) if step else "", number(rate[0]) if rate else ""
        rows.append((name, *shown, str(len(figures))))
    if rows:
        yield Table("What was run", ("", "ms of a typical step", "samples/s", "runs"), rows)


def _notes(diagnosis: Diagnosis) -> Iterator[str]:
    evidence = diagnosis.evidence
    normal, alone = evidence.figure(NORMAL), evidence.figure(ALONE)
    if normal and alone:
        share = alone[0] / normal[0]
        yield f"A rank of {evidence.ranks} is at {share:.0%} of the speed that one rank has alone."
    share = sum(cause.seconds for cause in diagnosis.causes) / evidence.step_s
    if share > OVERLAPPING:
        yield (
            f"Together the losses are {share:.0%} of a step: some happen at the same time, on several ranks, and "
            "to mend one may gain less than its share."
        )
    steps = plural(min(profile.steps for profile in evidence.profiles), "step")
    busy = f"{evidence.machine.other_cores:.1f} of {plural(evidence.cores, 'core')}"
    yield f"Stacks are of {steps} on each rank; other programs kept {busy} busy meanwhile."


def _data(diagnosis: Diagnosis) -> dict[str, Any]:
    """Return everything in plain JSON."""
    evidence = diagnosis.evidence
    made: dict[str, Any] = msgspec.to_builtins(
        {
            "subject": diagnosis.subject,
            "ranks": evidence.ranks,
            "facts": dict(evidence.facts),
            "step_s": evidence.step_s,
            "runs": {name: list(runs) for name, runs in evidence.runs.items()},
            "machine": asdict(evidence.machine) | {"cores": evidence.cores},
            "exchange": None if evidence.line is None else asdict(evidence.line),
            "causes": [
                {"name": CAUSES[cause.kind].name, "share": cause.seconds / evidence.step_s, **asdict(cause)}
                for cause in diagnosis.causes
            ],
            "unclear": [asdict(cause) for cause in diagnosis.unclear],
            "switches": [switch._asdict() for switch in diagnosis.switches],
            "actions": [asdict(action) for action in diagnosis.actions],
            "tried": [tried._asdict() for tried in diagnosis.tried],
        }
    )
    return made
