"""One rank's trace, as Chrome and Perfetto read it: PyTorch's events and ours, on rank 0's clock.

All events are in one line, so that those of several ranks are put together without being read:

    {"displayTimeUnit": "ms", "baseTimeNanoseconds": 1795338676382551000, ..., "traceEvents": [
    {"ph":"M","name":"process_name","pid":100,"tid":0,"ts":0,"args":{"name":"rank 0 (node7)"}},...
    ]}
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hvd_trainer.backends.base import Span
from hvd_trainer.observe.profiler.operators import OPERATOR
from hvd_trainer.utils.files import atomic_write

Event = dict[str, Any]
PIDS, GPUS = 100, 10
"""Numbers of processes in the trace: so many for each rank, the first one itself, and from 10 on its GPUs."""
OWN_ROWS = 2**22
"""Numbers of our rows in a rank's process: Linux gives none so high to a thread."""
FLOWS = 2**40
"""Numbers of a rank's arrows: those from an operator to what it has a GPU do."""
COMPRESSION = 3
"""Of 1 to 9. Level 6 takes 2.4 times as long, for a file of 87% of the size."""
END = b"\n]}\n"


def file_of(folder: Path, rank: int) -> Path:
    """Return the path of a rank's trace."""
    return folder / f"rank-{rank}.json.gz"


def write_rank(
    file: Path, rank: int, raw: Mapping[str, Any], rows: Mapping[str, Iterable[Span]], shift_ns: int
) -> None:
    """Write a rank's trace.

    Args:
        raw: PyTorch's own trace.
        rows: what else has been recorded: of this process under its host's name, and then of its engine.
        shift_ns: what is taken off every time, so that the trace begins at 0 on rank 0's clock.
    """
    first = (rank + 1) * PIDS
    events = [*_from_torch(raw, rank, shift_ns)]
    named: dict[int, str] = {}
    for pid, (what, spans) in enumerate(rows.items(), start=first):
        named[pid] = f"rank {rank}: {what}" if named else f"rank {rank} ({what})"
        events += _from_spans(spans, pid, shift_ns)
    used = {event["pid"] for event in events if event["ph"] != "M"}
    for pid in sorted(used):
        name = named.get(pid, f"rank {rank}: GPU {pid - first - GPUS}")
        events += [about("process", "name", name, pid), about("process", "sort_index", pid, pid)]
    kept = {name: value for name, value in raw.items() if name not in ("traceEvents", "traceName")}
    write_events(
        file, kept | {"baseTimeNanoseconds": shift_ns}, [_line(event for event in events if event["pid"] in used)]
    )


def about(kind: str, what: str, value: str | int, pid: int, tid: int = 0) -> Event:
    """Return a metadata event of a process or a thread: its name, or its sort index."""
    return {
        "ph": "M",
        "name": f"{kind}_{what}",
        "pid": pid,
        "tid": tid,
        "ts": 0,
        "args": {what: value},
    }


def _from_torch(raw: Mapping[str, Any], rank: int, shift_ns: int) -> Iterator[Event]:
    first, shift_us = (rank + 1) * PIDS, (raw.get("baseTimeNanoseconds", 0) - shift_ns) / 1000
    named: set[tuple[str, int, int]] = set()
    labelled = (event for event in raw["traceEvents"] if event.get("name") == "process_labels")
    gpus = {event["pid"] for event in labelled if event["args"]["labels"].startswith("GPU")}
    # In a container this process may have the number of a GPU.
    gpus -= {next((event["pid"] for event in raw["traceEvents"] if event.get("cat") == OPERATOR), None)}
    for event in raw["traceEvents"]:
        pid = event.get("pid")
        if not isinstance(pid, int) or event["name"].startswith("process_"):
            continue  # the profiler's own beginning and end; and names, for which we have better ones
        name = event["name"], pid, event["tid"]
        if event["ph"] == "M":
            if name in named:
                continue  # it names a thread several times
            named.add(name)
        event["pid"] = first + (GPUS + pid if pid in gpus else 0)
        event["ts"] = 0 if event["ph"] == "M" else round(event["ts"] + shift_us, 3)
        if event["ts"] < 0:
            continue  # of the meeting before the first step
        if isinstance(event.get("id"), int):
            event["id"] += rank * FLOWS
        yield event


def _from_spans(spans: Iterable[Span], pid: int, shift_ns: int) -> Iterator[Event]:
    rows: dict[str, int] = {}
    for span in spans:
        if span.row not in rows:
            rows[span.row] = tid = OWN_ROWS + len(rows)
            # Above the threads.
            yield about("thread", "name", span.row, pid, tid)
            yield about("thread", "sort_index", len(rows) - 99, pid, tid)
        event = {"name": span.name, "pid": pid, "tid": rows[span.row], "ts": (span.began_ns - shift_ns) / 1000}
        if span.ended_ns > span.began_ns:
            yield event | {"ph": "X", "cat": "hvd_trainer", "dur": (span.ended_ns - span.began_ns) / 1000}
        else:
            yield event | {"ph": "i", "cat": "hvd_trainer", "s": "t"}


def _line(events: Iterable[Event]) -> bytes:
    return json.dumps(list(events), separators=(",", ":"))[1:-1].encode()


def read_events(content: bytes) -> bytes:
    """Return the line of events of a file that `write_events` has written.

    Raises:
        OSError, EOFError, ValueError: it is none, or is cut off.
    """
    text = gzip.decompress(content)
    if not text.endswith(END):
        raise ValueError("a trace is cut off")
    return text[text.index(b"\n") + 1 : -len(END)]


def write_events(file: Path, facts: Mapping[str, Any], parts: Iterable[bytes]) -> None:
    """Write a whole trace, or nothing."""
    facts = {"displayTimeUnit": "ms", **facts}
    with atomic_write(file) as temporary, gzip.open(temporary, "wb", COMPRESSION) as stream:
        stream.write(json.dumps(facts)[:-1].encode() + b', "traceEvents": [\n')
        for number, part in enumerate(parts):
            stream.write(b",\n" if number else b"")
            stream.write(part)
        stream.write(END)
