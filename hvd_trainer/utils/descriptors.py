"""What a listening process does that has no file descriptor left."""

from __future__ import annotations

import errno
import time

NONE_LEFT = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
PAUSE_S = 0.1


def pause_if_none_left(error: OSError) -> None:
    """Wait after an `accept` that found no descriptor: its connection stays, and is ready again at once."""
    if error.errno in NONE_LEFT:
        time.sleep(PAUSE_S)
