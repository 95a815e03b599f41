"""One checkpoint in the files of several ranks, whose writing threads talk by the ranks' store.

rank 0         make the folder | announce it | write own tensors | collect reports | write state and manifest.json
other ranks                    | wait for it | write own tensors | report

They report names, checksums and the tree of what they have, no tensors: these are in the folder that all share.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed as dist
from msgspec import Struct
from safetensors import SafetensorError

from hvd_trainer.backends.session import Session
from hvd_trainer.checkpoint.storage import FileChecksum, OpenCheckpoint, write_tensors
from hvd_trainer.errors import CheckpointError, first_line

PART = "state-{:05d}.safetensors"
CHECK_S = 0.05
"""How often a rank that waits for another one looks for its report."""
REMEDY = (
    "With --stages and --shard each rank saves and reads its own part: name a --log-dir that all hosts share, or "
    "leave these options out"
)


class Report(Struct, frozen=True, kw_only=True):
    """Report of one rank on its part."""

    tree: Any = None
    tensors: FileChecksum | None = None
    """of its file; None if it has none to write"""
    error: str = ""


class CheckpointParts:
    """The parts of one checkpoint.

    Args:
        number: of the checkpoint among those of the session.
        given_up: set when this rank ends, and need not wait for others any more.
    """

    def __init__(self, session: Session, number: str, given_up: threading.Event) -> None:
        self._world, self._hosts = session.world, [peer.host for peer in session.peers]
        self._store = dist.PrefixStore(f"checkpoint/{number}", session.store)
        self._given_up = given_up

    def announce(self, folder: Path | None) -> None:
        """Tell the other ranks where to write; None: nowhere, because rank 0 cannot."""
        self._store.set("folder", "" if folder is None else str(folder.absolute()))

    def write(self, copied: OpenCheckpoint) -> None:
        """Write this rank's part, and report it.

        Raises:
            CheckpointError: it cannot be written.
        """
        folder = self._wait("folder")
        if not folder:
            return
        report = self._write(Path(folder), copied)
        self._store.set(str(self._world.rank), msgspec.json.encode(report).decode())
        if report.error:
            raise CheckpointError(report.error)

    def _write(self, folder: Path, copied: OpenCheckpoint) -> Report:
        own, host = PART.format(self._world.rank), self._hosts[self._world.rank]
        if not folder.is_dir():
            lost = f"{own} cannot be written: {folder} of {self._hosts[0]} is not on {host}"
            return Report(error=f"{lost}. {REMEDY}")
        try:
            written = write_tensors(folder / own, copied.tensors) if copied.tensors else None
            return Report(tree=copied.tree, tensors=written)
        except (OSError, ValueError, SafetensorError) as error:
            return Report(error=f"{own} cannot be written on {host}: {first_line(error)}")

    def collect(self, folder: Path, tree: Any) -> tuple[Any, dict[str, FileChecksum]]:
        """Wait for the other ranks' parts; return the tree of all ranks, and the checksums of their files.

        Raises:
            CheckpointError: a rank could not write its part, or that is not in the folder.
        """
        checksums = {}
        for rank in range(1, self._world.size):
            report = msgspec.json.decode(self._wait(str(rank)), type=Report)
            if report.error:
                raise CheckpointError(report.error)
            tree = merge_trees(tree, report.tree)
            if report.tensors is not None:
                name = PART.format(rank)
                if not (folder / name).is_file():
                    lost = f"{name}, which was written on {self._hosts[rank]}, is not on {self._hosts[0]}"
                    raise CheckpointError(f"{lost}. {REMEDY}")
                checksums[name] = report.tensors
            self._store.delete_key(str(rank))
        self._store.delete_key("folder")
        return tree, checksums

    def _wait(self, key: str) -> str:
        # `Store.wait` keeps a connection that other threads need, and warns each time that it is interrupted.
        while not self._store.check([key]):
            if self._given_up.wait(CHECK_S) and not self._store.check([key]):
                raise CheckpointError("another rank did not write its part before the job ended")
        return self._store.get(key).decode()


def merge_trees(one: Any, other: Any) -> Any:
    """Return a tree with what two ranks have of a state; where both have something, that of the first one."""
    if isinstance(one, dict) and isinstance(other, dict):
        if "$dict" in one and "$dict" in other:
            pairs = [{str(key): [key, value] for key, value in tree["$dict"]} for tree in (one, other)]
            return {"$dict": [*merge_trees(*pairs).values()]}
        return {key: merge_trees(one.get(key), other.get(key)) for key in one | other}
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [merge_trees(*pair) for pair in zip(one, other, strict=True)]
    return other if one is None else one
