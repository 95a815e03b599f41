"""Wait until a condition holds."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
PATIENCE_S = 300.0
"""Longer than what a test waits for takes on a busy machine: a test proves that it comes, not how soon."""


def wait_for(condition: Callable[[], T], explain: Callable[[], str] = str) -> T:
    """Return what a condition returns once it is true; fail with an explanation if that takes too long."""
    end = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < end, explain()
        time.sleep(0.02)
    return found
