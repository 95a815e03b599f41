"""Download data sets, or say in an error of this package why that is impossible."""

from __future__ import annotations

import socket
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException

from hvd_trainer.errors import DataError, first_line

SILENCE_S = 5.0
"""How long a server may be silent, in seconds."""


@contextmanager
def downloading(url: str) -> Iterator[None]:
    """Download from a server inside the block, which begins once the server has answered.

    So a folder that the block makes does not stay behind where the network is missing. A download that stalls ends
    with an error: the limit is set for all sockets that this process makes meanwhile, as torchvision takes none.

    Raises:
        DataError: the server does not answer, or the block has raised what a download raises.
    """
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(SILENCE_S)
    try:
        urllib.request.urlopen(url).close()
        yield
    # A file with another hash is a ValueError of pooch, and a RuntimeError of torchvision.
    except (OSError, HTTPException, ValueError, RuntimeError) as error:
        reason = str(getattr(error, "reason", "")) or first_line(error)
        raise DataError(f"{url} cannot be downloaded ({reason})") from error
    finally:
        socket.setdefaulttimeout(before)
