"""The report, as Markdown and as JSON: what is proven, measured, failed, or could not be shown here."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from gpu.bench import Check, Ran
from hvd_trainer.measure.report import Table

PROVEN, MEASURED, FAILED, NOT_HERE = "proven", "measured", "failed", "not provable here"
Status = Literal["proven", "measured", "failed", "not provable here"]
MAX_TAIL_LINES, MAX_TAIL_CHARACTERS = 25, 4_000


@dataclass(frozen=True)
class Outcome:
    """What came of a check."""

    stage: str
    name: str
    status: Status
    why: str
    """what failed, or what is missing"""
    seconds: float
    figures: dict[str, Any] = field(default_factory=dict)
    commands: list[dict[str, Any]] = field(default_factory=list)
    """each with its exit code, seconds and the tail of its output"""


def outcome(
    stage: str, check: Check, status: Status, why: str, seconds: float, figures: dict[str, Any], ran: Sequence[Ran]
) -> Outcome:
    """Return an outcome with the tails of what the commands printed."""
    commands = [
        {"command": its.command, "exit_code": its.code, "seconds": round(its.seconds, 1), "tail": tail(its.output)}
        for its in ran
    ]
    return Outcome(stage, check.name, status, why, round(seconds, 1), figures, commands)


def tail(output: str) -> str:
    return "\n".join(output.strip().splitlines()[-MAX_TAIL_LINES:])[-MAX_TAIL_CHARACTERS:]


class Report:
    """Written anew after each check, so that it is there whatever happens.

    Args:
        folder: for gpu-report.md and gpu-report.json.
        about: the machine, and how the runner was called.
        earlier: a gpu-report.json, whose outcomes of other stages stay; or None.
    """

    def __init__(self, folder: Path, about: dict[str, Any], earlier: Path | None, stages: Sequence[str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.about = folder, about
        before = json.loads(earlier.read_text())["checks"] if earlier is not None else []
        self.kept = [Outcome(**its) for its in before if its["stage"] not in stages]
        self.new: list[Outcome] = []

    def add(self, its: Outcome) -> None:
        self.new.append(its)
        everything = [*self.kept, *self.new]
        content = {"about": self.about, "checks": [asdict(one) for one in everything]}
        (self.folder / "gpu-report.json").write_text(json.dumps(content, indent=1, default=str))
        (self.folder / "gpu-report.md").write_text(markdown(self.about, everything))

    def summary(self) -> str:
        found = [its.status for its in self.new]
        counts = [f"{found.count(status)} {status}" for status in (PROVEN, MEASURED, FAILED, NOT_HERE)]
        return f"{', '.join(counts)}: {self.folder / 'gpu-report.md'}"


def markdown(about: dict[str, Any], outcomes: Sequence[Outcome]) -> str:
    lines = ["# gpu-test", "", *(f"- {name}: {value}" for name, value in about.items()), ""]
    if about["device"] == "cpu":
        lines += ["**On the CPU: it shows that the checks run, and nothing of GPUs.**", ""]
    for status in (FAILED, NOT_HERE):
        lines += [f"## {status.capitalize()}", ""]
        lines += [f"- {its.stage}, {its.name}: {plain(its.why)}" for its in outcomes if its.status == status]
        lines += [""]
    rows = []
    for its in outcomes:
        figures = "; ".join(f"{name}: {value}" for name, value in its.figures.items())
        rows.append((its.stage, its.name, its.status, figures, str(its.seconds)))
    table = Table("", ("stage", "check", "status", "figures", "s"), rows, words=(0, 1, 2, 3))
    lines += ["## All checks", "", table.markdown(), "", "## Commands, and the ends of what they printed", ""]
    for its in outcomes:
        lines += [f"<details><summary>{its.stage}, {its.name}: {its.status}</summary>", ""]
        for one in its.commands:
            shown = one["tail"] if its.status == FAILED else "\n".join(one["tail"].splitlines()[-5:])
            lines += [f"exit code {one['exit_code']} after {one['seconds']} s", "", "````", one["command"], shown]
            lines += ["````", ""]
        lines += ["</details>", ""]
    return "\n".join(lines)


def plain(text: str) -> str:
    """Return a text that keeps to one line."""
    return re.sub(r"\s+", " ", text).replace("|", "\\|")
