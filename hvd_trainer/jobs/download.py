"""Download files by pooch within time limits, each whole or not at all."""

from __future__ import annotations

import http.client
import logging
import time
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from pathlib import Path
from typing import NamedTuple

from hvd_trainer.errors import DataError, first_line
from hvd_trainer.utils.process import start_in_thread

CONNECT_S = 5.0
"""To reach the server, and between two pieces of a file."""


class RemoteFile(NamedTuple):
    """A file on a server, and the MD5 of its content."""

    url: str
    md5: str

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]


def download_missing(
    find: Callable[[], object], files: Sequence[RemoteFile], folder: Path, *, limit_s: float
) -> bool:
    """Download files into `folder` unless the data is found without; return whether it was not.

    The folder is made once the server has answered: one with a mistyped name does not stay behind.

    Args:
        find: raises DataError if the data is not there.

    Raises:
        DataError: the server cannot be reached, a file is not what it should be, or time is up.
    """
    try:
        find()
        return False
    except DataError as error:
        missing = str(error)
    try:
        _call_within(CONNECT_S, lambda: _reach(files[0].url), f"no answer in {CONNECT_S:.0f} s")
        _call_within(limit_s, lambda: _retrieve(files, folder, limit_s), f"it took longer than {limit_s:g} s")
    # A file with another MD5 is a ValueError.
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = str(getattr(error, "reason", "")) or first_line(error)
        raise DataError(f"{missing}, and it cannot be downloaded from here ({reason})") from error
    return True


def _call_within(limit_s: float, work: Callable[[], None], too_late: str) -> None:
    """Call a function in a thread that is left behind at a time limit: looking up a name has none of its own."""
    outcome = start_in_thread(work, "download")
    wait([outcome], limit_s)
    if not outcome.done():
        raise TimeoutError(too_late)
    outcome.result()


def _reach(url: str) -> None:
    with urllib.request.urlopen(url, timeout=CONNECT_S):
        pass


def _retrieve(files: Sequence[RemoteFile], folder: Path, limit_s: float) -> None:
    import pooch  # takes 0.3 s, and few starts download anything

    pooch.get_logger().setLevel(logging.WARNING)
    downloader = pooch.HTTPDownloader(timeout=CONNECT_S, progressbar=_Deadline(limit_s))
    for file in files:
        pooch.retrieve(file.url, f"md5:{file.md5}", fname=file.name, path=folder, downloader=downloader)


class _Deadline:
    """A progress bar that ends the download: nobody waits any more for one in a thread that was left behind."""

    def __init__(self, limit_s: float) -> None:
        self.total = 0
        self.end = time.monotonic() + limit_s

    def update(self, num_bytes: int) -> None:
        if time.monotonic() > self.end:
            raise TimeoutError

    def reset(self) -> None: ...

    def close(self) -> None: ...
