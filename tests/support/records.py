"""The records of metrics.jsonl, for comparing one run with another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

OF_ONE_RUN = frozenset(
    ("seconds", "samples_per_s", "first_step_s", "saves", "save_stall_s", "peak_memory_mb", "base_memory_mb")
)
"""Of this machine at that moment, and so in no two runs the same."""


def records(log: Path) -> list[dict[str, Any]]:
    """Return all records, without the figures that differ between any two runs."""
    lines = [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in OF_ONE_RUN} for line in lines]
