"""How long a rank that has nothing new to say waits to be ended."""

from __future__ import annotations

import threading

GRACE_S = 10.0


def wait_for_launcher(seconds: float = GRACE_S) -> None:
    """Returns after so many seconds, if the launcher has not ended this process before, as it does.

    All launchers end every rank at the first bad exit, some within milliseconds. So a rank whose error another
    one tells better must not end first, or that one is ended before it has printed. If nobody else fails
    meanwhile, the error is this rank's own to tell.
    """
    threading.Event().wait(seconds)
