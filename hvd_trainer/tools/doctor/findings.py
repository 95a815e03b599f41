"""Define a finding, one line of the report and what to type about it, and print findings as lines or as JSON."""

from __future__ import annotations

import datetime
import json
import os
import shutil
import socket
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal, TextIO

from hvd_trainer.horovod_build.facts import installed_version
from hvd_trainer.utils.text import COMMAND, plural

Status = Literal["ok", "warning", "error"]
COLOURS: dict[Status, str] = {"ok": "32", "warning": "33", "error": "31"}
STATUS_WIDTH, NAME_WIDTH = 7, 12
MIN_TEXT_WIDTH = 60


@dataclass(frozen=True)
class Finding:
    """The result of one check: its subject, its status, and what was found."""

    name: str
    status: Status
    found: str
    remedy: str = ""
    """what to type; empty if the status is ok"""
    figures: Mapping[str, float] = field(default_factory=dict)
    """measurements, for scripts"""


def ok(name: str, text: str, **figures: float) -> Finding:
    """Build a finding that needs no action."""
    return Finding(name, "ok", text, figures=figures)


def warning(name: str, text: str, remedy: str, **figures: float) -> Finding:
    """Build a finding with which training works, but slowly or not in all cases."""
    return Finding(name, "warning", text, remedy, figures)


def error(name: str, text: str, remedy: str, **figures: float) -> Finding:
    """Build a finding with which training, or a part of it that was requested, fails."""
    return Finding(name, "error", text, remedy, figures)


def no_answer(name: str, limit_s: float) -> Finding:
    """Build the error of a check that had no answer in `limit_s` seconds."""
    remedy = f"{COMMAND} doctor --timeout-s {max(60, round(5 * limit_s))}    (if this machine is slow)"
    return error(name, f"no answer in {limit_s:g} s", remedy)


def size(number: float) -> str:
    """Format a number of bytes: `64 MB`, `7.9 GB`."""
    megabytes = number / 2**20
    return f"{megabytes:.0f} MB" if megabytes < 1000 else f"{megabytes / 1024:,.1f} GB"


def name_width(findings: Sequence[Finding]) -> int:
    """Return the width of the column of names for these findings; at least that of the findings of `--run`."""
    return max([NAME_WIDTH, *(len(finding.name) for finding in findings)])


def print_findings(findings: Sequence[Finding], width: int, out: TextIO) -> None:
    """Print `warning  /dev/shm      64 MB ...` and below it `type: ...`; on a terminal in colours and wrapped."""
    for finding in findings:
        texts = [finding.found, *([f"type: {finding.remedy}"] if finding.remedy else [])]
        status, begin = f"{finding.status:<{STATUS_WIDTH}}", " " * (STATUS_WIDTH + width + 4)
        if out.isatty():
            room = max(MIN_TEXT_WIDTH, shutil.get_terminal_size().columns) - len(begin)
            # Paths and options stay whole, so that they can be copied.
            wrapper = textwrap.TextWrapper(room, "", "  ", break_long_words=False, break_on_hyphens=False)
            texts = [line for text in texts for line in wrapper.wrap(text)]
            if "NO_COLOR" not in os.environ:
                status = f"\x1b[{COLOURS[finding.status]}m{status}\x1b[0m"
        lines = [f"{status}  {finding.name:<{width}}  {texts[0]}", *(begin + text for text in texts[1:])]
        out.write("\n".join(lines) + "\n")
    out.flush()


def summary(findings: Sequence[Finding]) -> str:
    """Count the findings by status: `18 checks: 15 ok, 2 warnings, 1 error`."""
    number = Counter(finding.status for finding in findings)
    parts = [f"{number['ok']} ok", plural(number["warning"], "warning"), plural(number["error"], "error")]
    return f"{plural(len(findings), 'check')}: {', '.join(parts)}"


def as_json(findings: Sequence[Finding], seconds: float) -> str:
    """Format the findings as one JSON document, whose keys are a public format."""
    number = Counter(finding.status for finding in findings)
    document = {
        "hvd_trainer": installed_version("hvd_trainer"),
        "host": socket.gethostname(),
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "seconds": round(seconds, 2),
        "counts": {status: number[status] for status in COLOURS},
        "findings": [asdict(finding) for finding in findings],
    }
    return json.dumps(document, indent=2)
