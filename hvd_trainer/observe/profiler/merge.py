"""Merge the ranks' traces into one file, on rank 0's node."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hvd_trainer.backends import Backend
from hvd_trainer.observe.profiler.trace import file_of, read_events, write_events

MERGED = "trace.json.gz"
LARGEST_SENT_BYTES, PIECE_BYTES = 2**28, 2**24
"""What other nodes send if rank 0 cannot see their files, all together and in one go."""


@dataclass(frozen=True)
class Written:
    """The size and checksum of a rank's file, by which rank 0 recognises it."""

    size: int
    checksum: int
    trouble: str | None = None
    """Why there is none."""

    @classmethod
    def of(cls, content: bytes) -> Written:
        return cls(len(content), zlib.crc32(content))


def bring(backend: Backend, folder: Path, files: Sequence[Written]) -> None:
    """Copy the files that rank 0 does not see to its folder, unless they are too large. A collective.

    Args:
        backend: the engine.
        folder: of the traces, on this rank's node.
        files: of all ranks.
    """
    unseen = []
    if backend.world.is_first:
        there = [rank for rank, its in enumerate(files) if its.trouble is None]
        unseen = [rank for rank in there if _content(folder, rank, files[rank]) is None]
        if sum(files[rank].size for rank in unseen) > LARGEST_SENT_BYTES:
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
