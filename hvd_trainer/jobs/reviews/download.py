"""One file from a server, within time limits, whole or not at all."""

from __future__ import annotations

import hashlib
import http.client
import os
import socket
import threading
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

from hvd_trainer.errors import first_line

CONNECT_S = 5.0
"""To reach the server, and between two pieces of the file."""
PIECE_BYTES = 2**18


def download(url: str, file: Path, md5: str, *, patience_s: float) -> str | None:
    """Downloads `file`; returns what is wrong if it cannot.

    Args:
        md5: what the file must have.
        patience_s: how long it may take, in seconds.
    """
    # Nodes that share the folder may download at the same time.
    part = file.with_name(f".{file.name}.{socket.gethostname()}.{os.getpid()}")
    attempt = _Attempt(url, part, md5)
    attempt.start()
    attempt.under_way.wait(CONNECT_S)
    if not attempt.under_way.is_set():
        attempt.trouble = f"no answer in {CONNECT_S:.0f} s"
    else:
        attempt.join(patience_s)
        if attempt.is_alive():
            attempt.trouble = f"it took longer than {patience_s:g} s"
    # From here on it neither goes on nor begins.
    attempt.given_up.set()
    if attempt.trouble is None:
        attempt.part.replace(file)
    else:
        attempt.clear_away()
    return attempt.trouble


class _Attempt(threading.Thread):
    """A thread that may be left behind: looking up a server's name has no time limit of its own."""

    def __init__(self, url: str, part: Path, md5: str) -> None:
        super().__init__(name="download", daemon=True)
        self.url, self.part, self.md5 = url, part, md5
        self.under_way, self.given_up = threading.Event(), threading.Event()
        self.trouble: str | None = None

    def run(self) -> None:
        try:
            with urllib.request.urlopen(self.url, timeout=CONNECT_S) as answer:
                self.under_way.set()
                found = self._store(answer)
            if not self.given_up.is_set() and found != self.md5:
                self.trouble = f"what came has the MD5 {found}, not {self.md5}"
        except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
            self.trouble = str(getattr(error, "reason", "")) or first_line(error)
        finally:
            self.under_way.set()
            if self.given_up.is_set():
                self.clear_away()

    def clear_away(self) -> None:
        """Leaves nothing of what came, if anything did."""
        with suppress(OSError):
            self.part.unlink()

    def _store(self, answer: Any) -> str:
        """Writes what comes; returns its MD5."""
        md5 = hashlib.md5(usedforsecurity=False)
        # Not sooner: a folder of a mistyped name shall not stay behind where there is no internet.
        self.part.parent.mkdir(parents=True, exist_ok=True)
        with self.part.open("wb") as out:
            while not self.given_up.is_set() and (piece := answer.read(PIECE_BYTES)):
                md5.update(piece)
                out.write(piece)
        return md5.hexdigest()
