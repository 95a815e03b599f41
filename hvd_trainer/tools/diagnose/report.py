"""The report of a diagnosis: a verdict about each cause, with what to do, then what was run."""

from __future__ import annotations

import linecache
import math
import shlex
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec

from hvd_trainer.measure.formats import number
from hvd_trainer.measure.machine import Ran
from hvd_trainer.measure.measured import MeasuredTrial
from hvd_trainer.measure.report import Bar, Bars, Report, Source, Table, Verdict
from hvd_trainer.tools.diagnose.actions import CAUSES, Action, find_actions
from hvd_trainer.tools.diagnose.causes import OF_THE_MACHINE, find_candidates, leading
from hvd_trainer.tools.diagnose.evidence import ALONE, NO_EXCHANGE, NORMAL, SIGMAS, Cause, Evidence, ms
from hvd_trainer.tools.diagnose.roles import GIL, QUEUE, SLOW, TEXTS, WAITING
from hvd_trainer.tools.diagnose.switches import Switch, find_switches
from hvd_trainer.tools.diagnose.trials import RUN_S, steps_of
from hvd_trainer.utils.text import COMMAND, plural

OVERLAPPING = 1.02
"""Sum of the causes' fractions of a step from which it is said that they overlap."""
SOURCE_LINES = 3
"""Lines before a blamed one, and behind it, that are shown with it."""
MIN_PART = 0.005
"""Fraction of a step below which a part is not drawn."""
LAST = ("exchange", QUEUE, GIL, SLOW)
"""Parts behind those that the rank works in."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What a diagnosis has come to."""

    ran: Ran
    evidence: Evidence
    normal: MeasuredTrial
    """the job as it was run"""
    failure: str = ""
    """why the job has failed as it is; empty if it has not"""
    warnings: Sequence[str] = ()

    @cached_property
    def candidates(self) -> list[Cause]:
        """All causes that are worth an action, the largest first."""
        return find_candidates(self.evidence)

    @property
    def causes(self) -> list[Cause]:
        """Those that are more than the noise; last those about which all that is advised changes the training."""

        def is_last(cause: Cause) -> bool:
            actions = self.actions_on(cause)
            return bool(actions) and all(action.changes_numbers for action in actions)

        return sorted(self.by_size, key=is_last)

    @property
    def by_size(self) -> list[Cause]:
        """Those, the largest first."""
        return [cause for cause in self.candidates if cause.is_clear]

    @property
    def unclear(self) -> list[Cause]:
        """Those within the noise."""
        return [cause for cause in self.candidates if not cause.is_clear and math.isfinite(cause.error)]

    @cached_property
    def actions(self) -> list[Action]:
        """What to do about them."""
        return find_actions(self.by_size, self.evidence)

    @cached_property
    def switches(self) -> list[Switch]:
        """What is on and slows every step, as far as no cause tells it."""
        told = any(cause.kind == "contention" for cause in self.causes)
        return list(find_switches(self.evidence, with_threads=not told))

    def actions_on(self, cause: Cause) -> list[Action]:
        return [action for action in self.actions if action.cause is cause]


def conclude(diagnosis: Diagnosis) -> Report:
    """Return all that a diagnosis has to say: without stacks, why there are none."""
    if not diagnosis.evidence.profiles:
        verdict = Verdict(diagnosis.failure, "failed", badge="TOO SHORT")
        return Report(ran=diagnosis.ran, verdicts=[verdict], warnings=diagnosis.warnings)
    return Report(
        ran=diagnosis.ran,
        verdicts=[*_verdicts(diagnosis)],
        warnings=[*diagnosis.warnings, *_warnings(diagnosis.evidence)],
        tables=[*_tables(diagnosis)],
        bars=_step_bars(diagnosis),
        notes=[*_notes(diagnosis)],
        advice=[*_to_prove(diagnosis)][:1],
        data=_data(diagnosis),
    )


def _verdicts(diagnosis: Diagnosis) -> Iterator[Verdict]:
    evidence, causes, switches = diagnosis.evidence, diagnosis.causes, diagnosis.switches
    if diagnosis.failure:
        yield Verdict(diagnosis.failure, "failed", ["What follows is from its steps until then."], badge="FAILED")
    for switch in switches:
        at = f"{switch.where}: " if switch.where else ""
        yield Verdict(f"On in every step: {at}{switch.text}.", "sure", badge="ON IN EVERY STEP")
    for cause in causes:
        place = "The largest loss" if cause is diagnosis.by_size[0] else "A loss"
        share = f"{cause.seconds / evidence.step_s:.0%}"
        shown = cause.evidence[:1].upper() + cause.evidence[1:]
        actions = diagnosis.actions_on(cause)
        yield Verdict(
            f"{place}: {CAUSES[cause.kind].name}, {share} of a step.",
            "sure",
            [f"{shown}.", *_to_do(cause, diagnosis)],
            badge=f"{share} OF A STEP",
            source=_source(cause),
            type=[shlex.join(action.words) for action in actions if action.words],
        )
    if diagnosis.unclear and all(cause.kind in OF_THE_MACHINE for cause in causes):
        within = ", ".join(
            f"{CAUSES[cause.kind].name} ({ms(cause.seconds)} {_error(cause)})" for cause in diagnosis.unclear
        )
        more = "More runs (--budget-s), on a quiet machine, would tell."
        yield Verdict(f"Within the noise, in ms of a step: {within}.", details=[more], badge="WITHIN THE NOISE")
    elif not (causes or switches):
        text = "Nothing takes more than a twentieth of a step but computing: there is little to gain."
        yield Verdict(text, badge="LITTLE TO GAIN")


def _to_do(cause: Cause, diagnosis: Diagnosis) -> Iterator[str]:
    actions = diagnosis.actions_on(cause)
    for action in actions:
        gain = f" (expected: {action.speed:.2f} times the samples/s, {action.low:.2f} to {action.high:.2f})"
        yield f"To do: {action.text}{gain if action.speed > 1 else ''}."
    if not actions and cause in leading(diagnosis.by_size):
        yield "Nothing is known that makes this cheaper."


def _to_prove(diagnosis: Diagnosis) -> Iterator[str]:
    """Yield the commands that run the job with each action and without it, in rounds."""
    normal, steps = diagnosis.normal, steps_of(RUN_S, diagnosis.evidence.step_s)
    for action in diagnosis.actions:
        if action.vary:
            given = ["--np", str(normal.ranks), "--backend", normal.engine, "--steps", str(steps)]
            given += [] if normal.threads is None else ["--threads", str(normal.threads)]
            words = [*COMMAND.split(), "compare", *given, "--vary", action.vary, "--", *normal.job]
            yield shlex.join(words)


def _source(cause: Cause) -> Source | None:
    """Return the line to blame between its neighbours; None where there is none, or its file cannot be read."""
    if cause.line is None:
        return None
    file, line = cause.line.frame.file, cause.line.frame.line
    lines = linecache.getlines(file)
    around = range(max(1, line - SOURCE_LINES), min(len(lines), line + SOURCE_LINES) + 1)
    return (
        Source(file, line, [(number, lines[number - 1].rstrip()) for number in around]) if line in around else None
    )


def _step_bars(diagnosis: Diagnosis) -> Bars:
    """Return what each rank does in a step, in the mean, and where the causes are in it."""
    evidence, bars = diagnosis.evidence, []
    for rank, (profile, table) in enumerate(zip(evidence.profiles, evidence.tables, strict=True)):
        seconds = defaultdict[str, float](float)
        waits_s = sum(table[role].own for role in WAITING)
        carried = evidence.carried[rank] / waits_s if waits_s else 0.0
        for role, cost in table.items():
            queued_s = carried * cost.own if role in WAITING else cost.queued
            seconds[TEXTS.get(role, role)] += cost.own + cost.queued - queued_s
            seconds[TEXTS[QUEUE]] += queued_s
            seconds[TEXTS[GIL]] += cost.gil
        seconds[TEXTS[QUEUE]] += profile.slow_queued_s
        small = [name for name, part_s in seconds.items() if part_s < MIN_PART * profile.step_s]
        for name in small:
            del seconds[name]
        # The parts are those of steps that are not slow.
        left_s = profile.step_s - sum(seconds.values())
        if left_s >= MIN_PART * profile.step_s:
            seconds[TEXTS[SLOW if profile.slow else "other"]] += left_s
        scale = 1000 * profile.step_s / sum(seconds.values())
        parts = ((name, scale * part_s) for name, part_s in seconds.items())
        bars.append(Bar(f"rank {rank}", sorted(parts, key=lambda part: part[0] in map(TEXTS.get, LAST))))
    drawn = {name for bar in bars for name, _ in bar.parts}
    marked, everywhere = dict[str, None](), []
    for cause in diagnosis.causes:
        parts_of_it = (CAUSES[cause.kind].part or cause.kind, str(cause.details.get("role", "")))
        blamed = [TEXTS[part] for part in parts_of_it if TEXTS.get(part, "") in drawn]
        marked |= dict.fromkeys(blamed)
        everywhere += [] if blamed else [CAUSES[cause.kind].name]
    text = "In colour: where the causes are. Milliseconds of a step, in the mean."
    text += f" In all parts: {', '.join(everywhere)}." if everywhere else ""
    return Bars("A step of each rank", text, bars, "ms", [*marked])


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
        rate = evidence.figure(name, "samples_per_s")
        rows.append((name, ms(evidence.mean_s(name)), number(rate[0]) if rate else "", str(len(figures))))
    if rows:
        yield Table("What was run", ("", "ms of a step", "samples/s", "runs"), rows)


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

    def plain(action: Action) -> dict[str, Any]:
        return {**vars(action), "cause": action.cause.kind}

    made: dict[str, Any] = msgspec.to_builtins(
        {
            **{name: getattr(evidence, name) for name in ("ranks", "facts", "step_s", "runs")},
            "machine": {**vars(evidence.machine), "cores": evidence.cores},
            "exchange": evidence.line,
            "causes": [
                {"name": CAUSES[cause.kind].name, "share": cause.seconds / evidence.step_s, **vars(cause)}
                for cause in diagnosis.causes
            ],
            "unclear": diagnosis.unclear,
            "switches": diagnosis.switches,
            "actions": [*map(plain, diagnosis.actions)],
        }
    )
    return made
