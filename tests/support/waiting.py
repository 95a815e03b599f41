"""Wait until a condition holds."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_for(condition: Callable[[], T], limit_s: float, explain: Callable[[], str] = str) -> T:
    """Return what a condition returns once it is true; fail with an explanation if that takes too long."""
    end = time.monotonic() + limit_s
    while not (found := condition()):
        assert time.monotonic() < end, explain()
        time.sleep(0.02)
    return found
