"""The records of metrics.jsonl."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

OF_ONE_RUN = frozenset(
    ("time", "started_at", "seconds", "samples_per_s", "first_step_s")
    + ("saves", "save_stall_s", "peak_memory_mb", "base_memory_mb")
)
"""Of this machine at that moment, and so in no two runs the same."""


def lines(log: Path, event: str = "") -> list[dict[str, Any]]:
    """Return all records of a run, or those of an event; none as long as there is no file."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    file = log / "metrics.jsonl"
    text = file.read_text().splitlines() if file.exists() else []
    found = [json.loads(line, parse_constant=refuse) for line in text]
    return [line for line in found if not event or line["event"] == event]


def records(log: Path) -> list[dict[str, Any]]:
    """Return all records, without the figures that differ between any two runs."""
    return [{key: value for key, value in line.items() if key not in OF_ONE_RUN} for line in lines(log)]
