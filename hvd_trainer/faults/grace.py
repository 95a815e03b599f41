"""How long a rank whose error another one reports waits before it exits."""

from __future__ import annotations

import threading

GRACE_S = 10.0


def wait_for_launcher(seconds: float = GRACE_S) -> None:
    """Wait for the launcher to end this process; return after a time if it does not.

    All launchers end every rank at the first bad exit code, some within milliseconds. A rank whose error is the
    consequence of another one's must not exit first, or that one is killed before it has printed its report. If no
    other rank fails within that time, this rank has to report its own error.

    Args:
        seconds: how long to wait.
    """
    threading.Event().wait(seconds)
