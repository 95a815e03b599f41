"""Kill a process of a trial inside its next save, in that process: so no save is too short to be hit.

    PLACE/in-saves    is made by a tool before the trial starts; a process that is hit adds its number and file
    PLACE/armed       is written by the tool, with a fraction; the first process that saves takes it

The kernel ends that process at its first write beyond this fraction of the file's usual size (RLIMIT_FSIZE): what
it leaves is what a kill at that moment leaves. A file without a usual size, such as the first, stays empty.
"""

from __future__ import annotations

import os
import resource
import signal
import time
from contextlib import suppress
from pathlib import Path

HITS, ARMED = "in-saves", "armed"
HIT_S = 10.0


class Saves:
    """Lets a tool end what is inside a save of a trial.

    Args:
        place: of the trial, which starts after this.
    """

    def __init__(self, place: Path) -> None:
        self._hits, self._armed = place / HITS, place / ARMED
        place.mkdir(parents=True, exist_ok=True)
        self._hits.write_text("")

    def arm(self, fraction: float) -> None:
        """End the process that saves next, when it has written so much of a file."""
        self._armed.with_suffix(".new").write_text(str(fraction))
        self._armed.with_suffix(".new").rename(self._armed)

    def hit(self) -> tuple[int, str] | None:
        """Return the process that was the last to be hit, and the name of its file; None if there is none."""
        for line in reversed(self._hits.read_text().splitlines()):
            pid, _, file = line.partition(" ")
            return int(pid), Path(file).name
        return None

    def disarm(self) -> tuple[int, str] | None:
        """End nothing from now on, and return what was hit."""
        with suppress(FileNotFoundError):
            self._armed.unlink()
            return None
        deadline = time.monotonic() + HIT_S
        while (
            hit := self.hit()
        ) is None and time.monotonic() < deadline:  # a process has taken it, and tells next
            time.sleep(0.001)
        return hit


class SaveKill:
    """Ends this process inside a save, once a tool has armed its trial.

    Args:
        place: of the trial.
    """

    def __init__(self, place: str) -> None:
        self._hits, self._armed = os.path.join(place, HITS), os.path.join(place, ARMED)
        self._below = tuple(os.path.join(place, name, "") for name in ("files", "folder"))
        self._usual_bytes = 0
        self._hit = ""
        # Python lets it be ignored: a write would fail, and the script could go around that.
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)

    def before_write(self, real: str) -> None:
        """Limit the size of files if this is the save to be hit."""
        if real == self._hit or not real.startswith(self._below) or "__pycache__" in real:
            return
        fraction = 0.0  # where the file before this one was smaller than the limit
        if not self._hit:
            try:
                with open(self._armed) as file:
                    fraction = float(file.read())
                os.unlink(self._armed)
            except FileNotFoundError:  # it is not armed, or another process has been quicker
                return
        with suppress(FileNotFoundError):
            self._usual_bytes = os.path.getsize(real)
        with open(self._hits, "a") as file:
            file.write(f"{os.getpid()} {real}\n")
        self._hit = real
        self._limit(resource.RLIMIT_CORE, 0)
        self._limit(resource.RLIMIT_FSIZE, int(fraction * self._usual_bytes))

    def before_rename(self, real: str) -> None:
        """Learn how large a file is that gets its name when it is whole; the one to be hit never gets it."""
        if real.startswith(self._below):
            if real == self._hit:
                os.kill(os.getpid(), signal.SIGKILL)
            with suppress(FileNotFoundError):
                self._usual_bytes = os.path.getsize(real)

    @staticmethod
    def _limit(kind: int, size: int) -> None:
        _, hard = resource.getrlimit(kind)
        resource.setrlimit(kind, (size if hard == resource.RLIM_INFINITY else min(size, hard), hard))
