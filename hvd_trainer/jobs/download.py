"""Download a file by pooch, whole or not at all."""

from __future__ import annotations

import logging
import urllib.request
from http.client import HTTPException
from pathlib import Path
from typing import Any

from hvd_trainer.errors import DataError, first_line

SILENCE_S = 5.0
"""How long the server may be silent, in seconds: to be reached, and between two pieces of a file."""


def download(url: str, md5: str, folder: Path, processor: Any = None) -> None:
    """Download a file into a folder, unless it is there.

    The folder is made once the server has answered: one with a mistyped name does not stay behind.

    Args:
        processor: pooch's, which unpacks the file.

    Raises:
        DataError: the server cannot be reached, or the file is not what it should be.
    """
    import pooch  # takes 0.3 s, and few starts download anything

    pooch.get_logger().setLevel(logging.WARNING)
    downloader = pooch.HTTPDownloader(timeout=SILENCE_S)
    try:
        urllib.request.urlopen(url, timeout=SILENCE_S).close()
        pooch.retrieve(
            url, f"md5:{md5}", url.rpartition("/")[2], folder, processor=processor, downloader=downloader
        )
    # A file with another MD5 is a ValueError.
    except (OSError, HTTPException, ValueError) as error:
        reason = str(getattr(error, "reason", "")) or first_line(error)
        raise DataError(f"{url} cannot be downloaded ({reason})") from error
