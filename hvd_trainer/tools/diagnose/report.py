"""The report of a diagnosis: tables, sentences and JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hvd_trainer.tools.diagnose.actions import Action
from hvd_trainer.tools.diagnose.causes import CAUSES, COMPUTING, Figures, Line, Shares
from hvd_trainer.tools.runner.formats import console, make_table, milliseconds, number
from hvd_trainer.utils.text import plural

BAR_LENGTH = 30
"""Length in characters of the bar for a whole step."""
Tried = Sequence[tuple[Action, float, float]]


@dataclass(frozen=True)
class Report:
    """The results of a diagnosis."""

    found: Shares
    line: Line
    runs: Mapping[str, Figures]
    facts: Mapping[str, Any]
    advice: Sequence[Action]
    ranks: int
    backend: str


def show(report: Report) -> None:
    """Print the tables and the sentences."""
    out, found = console(), report.found
    runs = [
        (name, milliseconds(figures["step_s"]), number(figures["samples_per_s"]))
        for name, figures in report.runs.items()
    ]
    out.print(make_table("What was run", ("", "ms per step", "samples/s"), runs))
    seconds = {
        COMPUTING: found.computing_s,
        **{text: found.seconds[cause] for cause, text in CAUSES.items()},
        "unexplained: overlaps and noise": found.unexplained_s,
    }
    shares = {text: value / found.step_s for text, value in seconds.items()}
    parts = [
        (text, milliseconds(seconds[text]), f"{share:.0%}", "#" * round(BAR_LENGTH * max(share, 0)))
        for text, share in shares.items()
    ]
    out.print(make_table("What a step's time goes to", ("", "ms", "of a step", ""), parts, words=(0, 3)))
    for text in sentences(report):
        out.print(text, markup=False)


def sentences(report: Report) -> list[str]:
    """Return the conclusions, a sentence each."""
    found, facts, line = report.found, report.facts, report.line
    said = [
        f"A rank is at {found.efficiency:.0%} of the speed that one rank has alone "
        f"({plural(report.ranks, 'rank')} on {report.backend})."
    ]
    if found.is_doubtful:
        said.append(
            f"The runs contradict each other by {found.contradiction:.0%} of a step: "
            f"something else was at work on this machine, or steps differ much. What follows is a guess, so no "
            f"gain is given. Repeat it with more --rounds or --seconds."
        )
    if "exchange" in found.ranked:
        said.append(
            f"Of the exchange about {1000 * found.latency_s:.2f} ms are latency and "
            f"{1000 * found.bandwidth_s:.2f} ms bandwidth: an exchange takes {1000 * line.latency_s:.2f} ms + its "
            f"bytes / {line.bytes_per_s / 1e9:.2f} GB/s here, and the job has {number(facts['parameters'])} "
            f"parameters."
        )
    if not found.ranked:
        return [*said, "Nothing takes more than a twentieth of a step but computing: there is little to gain."]
    said.append(f"The largest loss: {CAUSES[found.ranked[0]]}, {found.share(found.ranked[0]):.0%} of a step.")
    for place, action in enumerate(report.advice, 1):
        is_known = action.speed > 1 and not found.is_doubtful
        gain = f" (expected: {action.speed:.2f} times the samples/s)" if is_known else ""
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
    found = report.found
    return {
        "backend": report.backend,
        "ranks": report.ranks,
        "facts": dict(report.facts),
        "runs": dict(report.runs),
        "shares": asdict(found)
        | {"unexplained_s": found.unexplained_s, "efficiency": found.efficiency, "ranked": found.ranked},
        "exchange": asdict(report.line),
        "advice": [asdict(action) for action in report.advice],
        "tried": [{"action": asdict(action), "before": before, "after": after} for action, before, after in tried],
    }
