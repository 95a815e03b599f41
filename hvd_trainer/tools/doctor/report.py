"""Print the findings as lines for people, or as one JSON document."""

from __future__ import annotations

import datetime
import json
import os
import shutil
import socket
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import TextIO

from hvd_trainer.horovod_build.facts import installed_version
from hvd_trainer.tools.doctor.finding import Finding, Status
from hvd_trainer.utils.text import plural

COLOURS: dict[Status, str] = {"ok": "32", "warning": "33", "error": "31"}
STATUS_WIDTH, NAME_WIDTH = 7, 12
MIN_TEXT_WIDTH = 60


def name_width(findings: Sequence[Finding]) -> int:
    """Return the width of the column of names for these findings; at least that of the findings of `--run`."""
    return max([NAME_WIDTH, *(len(finding.name) for finding in findings)])


def print_findings(findings: Sequence[Finding], width: int, out: TextIO) -> None:
    """Print each finding on an aligned line and its remedy below; on a terminal in colours and wrapped."""
    for finding in findings:
        out.write("\n".join(lines_of(finding, width, out)) + "\n")
    out.flush()


def lines_of(finding: Finding, width: int, out: TextIO) -> list[str]:
    """Format a finding: `warning  /dev/shm      64 MB ...`, and below it `type: ...`."""
    begin = " " * (STATUS_WIDTH + width + 4)
    texts = [finding.found, *([f"type: {finding.remedy}"] if finding.remedy else [])]
    if out.isatty():
        room = max(MIN_TEXT_WIDTH, shutil.get_terminal_size().columns) - len(begin)
        texts = [line for text in texts for line in _wrap(text, room)]
    status = f"{finding.status:<{STATUS_WIDTH}}"
    if out.isatty() and "NO_COLOR" not in os.environ:
        status = f"\x1b[{COLOURS[finding.status]}m{status}\x1b[0m"
    first, *rest = texts
    return [f"{status}  {finding.name:<{width}}  {first}", *(begin + line for line in rest)]


def _wrap(text: str, room: int) -> list[str]:
    """Wrap a text at spaces; paths and options stay whole, so that they can be copied."""
    return textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False, subsequent_indent="  ") or [
        text
    ]


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
