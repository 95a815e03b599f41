"""Bring the ranks' traces to rank 0's clock and into one file, as Chrome and Perfetto read it.

No rank leaves a barrier before all have entered it. So in each of a few barriers, with the clock of rank r being
ahead by x, what it enters at is before rank 0 leaves, and the other way round:

    rank 0      enters |=================| leaves          entered(r) - x  <  left(0)
    rank r         enters |===========| leaves             entered(0)      <  left(r) - x

Each barrier says of x that it lies between two numbers, and all together leave a range about as wide as an
exchange takes. Ranks on one machine have one clock.
"""

from __future__ import annotations

import gzip
import json
import os
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hvd_trainer.backends import Backend
from hvd_trainer.utils.files import atomic_write

BARRIERS = 20
JOINED = "trace.json.gz"
DEVICE_ROWS = 2**22
"""Numbers of a GPU's queues in the trace: Linux gives none so high to a thread."""
ARROWS = 2**40
"""Numbers of a rank's arrows: those from an operator to what it has a GPU do."""
COMPRESSION = 3
"""The level of gzip. Level 6 takes 2.4 times as long, for a file of 87% of the size."""
Stamps = Sequence[tuple[int, int]]
"""When a rank entered and left each barrier, in nanoseconds."""


class Ahead(NamedTuple):
    """The offset of a rank's clock from rank 0's, with its uncertainty."""

    by_ns: int
    unsure_ns: int
    """The truth is no farther from it than this."""


def this_machine() -> str:
    """Return the identity of this clock: the kernel's boot id, which containers of one machine share."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def compare_clocks(
    backend: Backend, machine: str | None = None, now: Callable[[], int] = time.time_ns
) -> list[Ahead]:
    """Return the clock offset of each rank. A collective: 20 barriers if there are several machines.

    Args:
        machine: that of this rank; `this_machine()` if None.
        now: its clock.
    """
    machines = backend.collectives.all_gather_object(machine or this_machine())
    if len(set(machines)) == 1:
        return [Ahead(0, 0)] * len(machines)
    stamps = []
    for _ in range(BARRIERS):
        entered = now()
        backend.collectives.barrier()
        stamps.append((entered, now()))
    return ahead_of_first(machines, backend.collectives.all_gather_object(stamps))


def ahead_of_first(machines: Sequence[str], stamps: Sequence[Stamps]) -> list[Ahead]:
    """Compute the clock offset of each rank from the machines and barrier stamps of all ranks."""
    last_entered, first_left = {}, {}
    for machine in dict.fromkeys(machines):
        own = [stamps[rank] for rank, other in enumerate(machines) if other == machine]
        last_entered[machine] = [max(entered for entered, _ in barrier) for barrier in zip(*own, strict=True)]
        first_left[machine] = [min(left for _, left in barrier) for barrier in zip(*own, strict=True)]
    first = machines[0]
    offsets = {first: Ahead(0, 0)}
    for machine in last_entered.keys() - {first}:
        least = max(e - left for e, left in zip(last_entered[machine], first_left[first], strict=True))
        greatest = min(left - e for left, e in zip(first_left[machine], last_entered[first], strict=True))
        # A clock that was set meanwhile leaves nothing between them.
        offsets[machine] = Ahead((least + greatest) // 2, abs(greatest - least) // 2 + 1)
    return [offsets[machine] for machine in machines]


def events_of_rank(trace: Mapping[str, Any], rank: int, host: str, origin_ns: int) -> bytes:
    """Return the events of PyTorch's trace as part of a joined one: as one process, in time since `origin_ns`."""
    named: list[tuple[str, str | int]] = [("name", f"rank {rank} ({host})"), ("sort_index", rank)]
    about = [
        {"ph": "M", "name": f"process_{key}", "pid": rank, "tid": 0, "ts": 0, "args": {key: value}}
        for key, value in named
    ]
    events = [*about, *_moved(trace["traceEvents"], rank, (trace["baseTimeNanoseconds"] - origin_ns) / 1000)]
    return json.dumps(events, separators=(",", ":"))[1:-1].encode()


def _moved(events: Sequence[dict[str, Any]], rank: int, shift_us: float) -> Iterator[dict[str, Any]]:
    own = os.getpid()
    for event in events:
        if not isinstance(event["pid"], int) or event["name"].startswith("process_"):
            continue  # the profiler's own beginning and end; and names, for which there are better ones
        moved = event | {"pid": rank, "ts": 0 if event["ph"] == "M" else round(event["ts"] + shift_us, 3)}
        if event["pid"] != own:  # a GPU's number
            moved["tid"] += DEVICE_ROWS
        if isinstance(event.get("id"), int):
            moved["id"] += rank * ARROWS
        yield moved


def join(backend: Backend, file: Path, events: bytes, origin_ns: int) -> int:
    """Send this rank's events to rank 0, which writes those of all. A collective.

    Returns:
        On rank 0: how many ranks had any.

    Raises:
        OSError: on rank 0: the file cannot be written.
    """
    own, parts = zlib.compress(events, COMPRESSION) if events else b"", []
    for rank in range(backend.world.size):
        sent = backend.collectives.broadcast_object(own, rank)
        if sent and backend.world.is_first:
            parts.append(sent)
    if parts:
        write_trace(file, map(zlib.decompress, parts), origin_ns)
    return len(parts)


def write_trace(file: Path, parts: Iterable[bytes], origin_ns: int) -> None:
    """Write a whole trace, or nothing.

    Raises:
        OSError: it cannot be written.
    """
    with atomic_write(file) as temporary, gzip.open(temporary, "wb", COMPRESSION) as stream:
        begin = f'{{"displayTimeUnit":"ms","baseTimeNanoseconds":{origin_ns},"traceEvents":[\n'.encode()
        for part in parts:
            stream.write(begin + part)
            begin = b",\n"
        stream.write(b"\n]}\n")
