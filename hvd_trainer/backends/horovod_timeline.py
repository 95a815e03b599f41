"""Horovod's own timeline of its exchanges, converted to the time of day.

Horovod writes a JSON list in which each tensor is a "process", and times are microseconds since its start; when
that was, by the clock of the host, stands in the first line:

    [{"name": "process_name", "ph": "M", "pid": 0, "args": {"start_time_since_epoch_in_micros": 1795338676382551}},
     {"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "allreduce.exchange.0.bucket.0"}},
     {"ph": "B", "name": "ALLREDUCE", "ts": 1298750, "pid": 1}, ..., {"ph": "E", "ts": 1299123, "pid": 1}]
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from hvd_trainer.backends.base import Span

DYNAMIC = "DYNAMIC"
"""The value of HOROVOD_TIMELINE by which a timeline can be started while Horovod runs."""


def read_timeline(file: Path) -> list[Span]:
    """Return the spans of a timeline: the phases of each tensor's exchange, and when each rank was ready for it.

    Spans that began before the file or had not ended with it are left out.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not a timeline of Horovod's.
    """
    text = file.read_text()
    if not text:
        return []  # Horovod writes nothing before the first exchange
    try:
        return _spans(_events(text))
    except (KeyError, TypeError) as error:
        raise ValueError(f"Horovod's timeline has an entry without {error}") from error


def _events(text: str) -> list[dict[str, Any]]:
    try:
        events: list[dict[str, Any]] = json.loads(text)
    except ValueError:
        events = json.loads(text.rstrip().rstrip(",") + "]")  # left open by a Horovod that was shut down
    return events


def _spans(events: list[dict[str, Any]]) -> list[Span]:
    start_us, names, spans = 0, {0: "cycles"}, []
    begun: dict[int, list[tuple[str, int]]] = defaultdict(list)
    for event in events:
        kind, row = event["ph"], event.get("pid", 0)
        if kind == "M":
            facts = event["args"]
            start_us = facts.get("start_time_since_epoch_in_micros", start_us)
            names[row] = facts.get("name", names.get(row, ""))
            continue
        at_ns = (start_us + event["ts"]) * 1000
        if kind == "B":
            begun[row].append((event["name"], at_ns))
        elif kind == "E":
            if begun[row]:
                spans.append(Span(names[row], *begun[row].pop(), at_ns))
        elif kind == "X":
            spans.append(Span(names[row], f"rank {event['name']} is ready", at_ns, at_ns))
    return sorted(spans, key=lambda span: (span.began_ns, -span.ended_ns))
