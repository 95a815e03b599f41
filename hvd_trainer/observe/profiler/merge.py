"""Bring the ranks' traces to rank 0's clock and into one file, on rank 0's node.

No rank leaves a barrier before all have entered it. So in each of a few barriers, with the clock of rank r being
ahead by x, what it enters at is before rank 0 leaves, and the other way round:

    rank 0      enters |=================| leaves          entered(r) - x  <  left(0)
    rank r         enters |===========| leaves             entered(0)      <  left(r) - x

Each barrier says of x that it lies between two numbers, and all together leave a range about as wide as an
exchange takes. Ranks on one machine have one clock.
"""

from __future__ import annotations

import socket
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from hvd_trainer.backends import Backend
from hvd_trainer.observe.profiler.trace import file_of, read_events, write_events

BARRIERS = 20
MERGED = "trace.json.gz"
MAX_SENT_BYTES, PIECE_BYTES = 2**28, 2**24
"""What other nodes send if rank 0 cannot see their files, all together and in one go."""
Stamps = Sequence[tuple[int, int]]
"""When a rank entered and left each barrier, in nanoseconds."""


class Ahead(NamedTuple):
    """The offset of a rank's clock from rank 0's, with its uncertainty."""

    by_ns: int
    unsure_ns: int
    """The truth is no farther from it than this."""


def this_machine() -> str:
    """Return the identity of this clock: the kernel's boot id, which containers of one machine share."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


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
        its = [stamps[rank] for rank, other in enumerate(machines) if other == machine]
        last_entered[machine] = [max(entered for entered, _ in barrier) for barrier in zip(*its, strict=True)]
        first_left[machine] = [min(left for _, left in barrier) for barrier in zip(*its, strict=True)]
    first = machines[0]
    found = {first: Ahead(0, 0)}
    for machine in last_entered.keys() - {first}:
        least = max(e - left for e, left in zip(last_entered[machine], first_left[first], strict=True))
        most = min(left - e for left, e in zip(first_left[machine], last_entered[first], strict=True))
        # A clock that was set meanwhile leaves nothing between them.
        found[machine] = Ahead((least + most) // 2, abs(most - least) // 2 + 1)
    return [found[machine] for machine in machines]


@dataclass(frozen=True)
class Written:
    """The size and checksum of a rank's file, by which rank 0 recognises it."""

    size: int
    checksum: int
    trouble: str | None = None
    """why there is none"""

    @classmethod
    def of(cls, content: bytes) -> Written:
        return cls(len(content), zlib.crc32(content))


def bring(backend: Backend, folder: Path, files: Sequence[Written]) -> None:
    """Copy the files that rank 0 does not see to its folder, unless they are too large. A collective.

    Args:
        folder: of the traces, on this rank's node.
        files: of all ranks.
    """
    unseen = []
    if backend.world.is_first:
        there = [rank for rank, its in enumerate(files) if its.trouble is None]
        unseen = [rank for rank in there if _content(folder, rank, files[rank]) is None]
        if sum(files[rank].size for rank in unseen) > MAX_SENT_BYTES:
            unseen = []
    for rank in backend.collectives.broadcast_object(unseen):
        mine = _content(folder, rank, files[rank]) or b"" if backend.world.rank == rank else b""
        pieces = []
        for begin in range(0, files[rank].size, PIECE_BYTES):
            pieces.append(backend.collectives.broadcast_object(mine[begin : begin + PIECE_BYTES], rank))
            if not backend.world.is_first:
                pieces.clear()
        if backend.world.is_first:
            with suppress(OSError):  # as if it had not been sent
                file_of(folder, rank).write_bytes(b"".join(pieces))


def _content(folder: Path, rank: int, wanted: Written) -> bytes | None:
    """Return the content of a rank's file; None if it is missing or another one."""
    with suppress(OSError):
        content = file_of(folder, rank).read_bytes()
        if Written.of(content) == wanted:
            return content
    return None


def merge(
    folder: Path, files: Sequence[Written], hosts: Sequence[str], origin_ns: int, about: dict[str, str]
) -> dict[int, str]:
    """Write the merged trace; return the ranks that are missing in it, and why. Write none if all are missing.

    Args:
        folder: of the traces.
        files: of all ranks.
        hosts: of all ranks.
        origin_ns: time 0 of the traces.
        about: is kept in the file.

    Raises:
        OSError, ValueError: it cannot be written.
    """
    missing: dict[int, str] = {}
    found: list[int] = []
    for rank, its in enumerate(files):
        if its.trouble is not None:
            missing[rank] = its.trouble
        elif _content(folder, rank, its) is None:
            missing[rank] = f"its trace has stayed on {hosts[rank]}, {file_of(folder, rank)}"
        else:
            found.append(rank)
    if not found:
        return missing
    about = about | {f"without rank {rank}": why for rank, why in missing.items()}
    parts = (read_events(file_of(folder, rank).read_bytes()) for rank in found)
    write_events(folder / MERGED, {"baseTimeNanoseconds": origin_ns, "otherData": about}, parts)
    return missing
