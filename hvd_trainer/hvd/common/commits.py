"""Files with the last commits of an elastic training, for the ranks that torchrun starts after these.

horovodrun leaves the ranks running that have not failed, so their memory is enough. torchrun ends all ranks and
starts others, which are children of the same process on each node.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from hvd_trainer.rendezvous.registry import private_file
from hvd_trainer.utils.files import atomic_write
from hvd_trainer.utils.process import start_time

NUMBER_BYTES = 8
PREFIX = "elastic"


class CommitFiles:
    """The commits of this node's ranks.

    Args:
        agent: number and start time of the process that starts the ranks of this node, again and again.
        is_writer: whether this rank writes them; the commits of all ranks are equal.

    Raises:
        LaunchError: the folder for them is not this user's alone.
    """

    def __init__(self, agent: str, is_writer: bool) -> None:
        self._path = private_file(f"{PREFIX} {agent}")
        self._is_writer = is_writer
        self._count = 0
        if is_writer:
            self._remove_abandoned()

    def _file(self, state: int) -> Path:
        return self._path.with_name(f"{self._path.name}_{state}")

    def write(self, state: int, committed: Callable[[], Any]) -> None:
        """Write a commit, in place of the last one.

        Args:
            state: which one of the script's states.
            committed: returns its content.
        """
        self._count += 1
        if not self._is_writer:
            return
        with atomic_write(self._file(state)) as temporary, temporary.open("wb") as file:
            file.write(self._count.to_bytes(NUMBER_BYTES, "big"))
            torch.save(committed(), file)

    def read(self, state: int) -> tuple[int, Any]:
        """Return number and content of the last commit; 0 if there is none, or another rank of this node reads."""
        if self._is_writer:
            with suppress(FileNotFoundError), self._file(state).open("rb") as file:
                number = int.from_bytes(file.read(NUMBER_BYTES), "big")
                # A rank of this job has written it, into a folder of this user's alone.
                return number, torch.load(file, map_location="cpu", weights_only=False)
        return 0, None

    def count_from(self, number: int) -> None:
        """Count on from the number of a commit."""
        self._count = number

    def remove(self) -> None:
        """Delete the files: all ranks have come to their end."""
        if self._is_writer:
            for file in self._path.parent.glob(f"{self._path.name}_*"):
                file.unlink(missing_ok=True)

    def _remove_abandoned(self) -> None:
        """Delete the files of jobs that have ended otherwise."""
        for file in self._path.parent.glob(f"{PREFIX}_*"):
            _, pid, began, *_ = file.name.split("_")
            with suppress(OSError):
                if start_time(int(pid)) == began:
                    continue
            with suppress(FileNotFoundError):
                os.unlink(file)
