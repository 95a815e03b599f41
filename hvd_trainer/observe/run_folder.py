"""The folder of a run: locked while the run lasts, known by the names of its job, and cleared of earlier runs."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import socket
import time
from collections.abc import Collection
from pathlib import Path
from typing import TextIO

from hvd_trainer.utils.files import find_file_in_the_way, find_unsafe_path, read_regular, write_atomically

METRICS, FACTS, LOCK, JOB, CONFIG = "metrics.jsonl", "run.json", ".lock", ".job", "config.yaml"
FOLDERS = ("failures", "profile")
CHECKPOINTS, EARLIER = "checkpoints", "earlier-"
TOKENIZER = "model.tokenizer.json"
"""Tokenizer of a language model. It is moved together with the weights."""
WRITTEN = (METRICS, LOCK, *FOLDERS)
"""Files that a run writes in place, and not by renaming a finished one."""
SET_ASIDE = (METRICS, FACTS, CONFIG, "model.safetensors", TOKENIZER, *FOLDERS)
"""Files of an earlier run that are moved away when another begins; its checkpoints are, too."""
EVENTS = "events.out.tfevents."
"""Beginning of the names of TensorBoard's files."""
RESERVED = (*sorted({*WRITTEN, *SET_ASIDE} - {LOCK}), CHECKPOINTS, EARLIER, EVENTS)
"""Beginnings of what a run has in its folder."""
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
"""Errors of file systems without locks, such as Lustre mounted without them."""
POLL_S = 0.1
MAX_NAMES_BYTES = 2**20


class RunFolder:
    """A folder that one run at a time writes to.

    Args:
        path: of the folder; it need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: TextIO | None = None

    def lock(self, patience_s: float) -> str | None:
        """Make the folder, and lock it until this process ends, however it ends.

        Args:
            patience_s: how long to wait for another process that has locked it.

        Returns:
            Why it cannot be written to, or None.
        """
        try:
            if file := find_file_in_the_way(self.path):
                return file
            self.path.mkdir(parents=True, exist_ok=True)
            if self._checkpoints.is_symlink() and not self._checkpoints.is_dir():
                return (
                    f"{self._checkpoints} is a link to {self._checkpoints.readlink()}, which is no folder. Make it"
                )
            return find_unsafe_path(self.path, WRITTEN) or self._lock_file(patience_s)
        except OSError as error:
            return str(error)

    def _lock_file(self, patience_s: float) -> str | None:
        self._lock = (self.path / LOCK).open("a+")
        deadline = time.monotonic() + patience_s
        while True:
            try:
                # A lock of the process, not of the open file, which workers of a killed rank keep a while longer.
                fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except (BlockingIOError, PermissionError):
                if time.monotonic() >= deadline:
                    self._lock.seek(0)
                    holder = self._lock.read().strip()
                    return f"another job is using it ({holder}). Name another folder, or end that job"
                time.sleep(POLL_S)
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
                break
        self._lock.truncate(0)
        self._lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        self._lock.flush()
        return None

    def belongs_to(self, names: Collection[str]) -> bool:
        """Return whether the run in the folder, as this node sees it, was begun by a job of these names."""
        try:
            known = read_regular(self.path / JOB, MAX_NAMES_BYTES).decode()
        except (OSError, ValueError):
            return False
        return not set(names).isdisjoint(known.splitlines())

    def write_names(self, names: Collection[str]) -> None:
        """Keep the names of the job whose run is in the folder."""
        write_atomically(self.path / JOB, "".join(f"{name}\n" for name in names))

    def set_aside(self) -> Path | None:
        """Move an earlier run's files to `earlier-1`, `earlier-2`, ...; return where, or None without any."""
        old = [self.path / name for name in SET_ASIDE if (self.path / name).exists()]
        old += self.path.glob(f"{EVENTS}*")
        checkpoints = [manifest.parent for manifest in self._checkpoints.glob("[!.]*/manifest.json")]
        if not old and not checkpoints:
            return None
        numbered = (f"{EARLIER}{number}" for number in itertools.count(1))
        places = (self.path, self._checkpoints)
        name = next(name for name in numbered if not any((place / name).exists() for place in places))
        aside = self.path / name
        aside.mkdir()
        for path in old:
            path.rename(aside / path.name)
        if checkpoints and not self._move_checkpoints(aside):
            (self._checkpoints / name).mkdir()
            for path in checkpoints:
                path.rename(self._checkpoints / name / path.name)
        return aside

    @property
    def _checkpoints(self) -> Path:
        return self.path / CHECKPOINTS

    def _move_checkpoints(self, aside: Path) -> bool:
        """Move the folder of checkpoints; return False if it is a link or a volume, on whose disk they stay."""
        if self._checkpoints.is_symlink():
            return False
        try:
            self._checkpoints.rename(aside / CHECKPOINTS)
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            return False
        return True

    def close(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            self._lock.close()
