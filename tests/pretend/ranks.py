"""Start ranks that have the pretend device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import launchers

from pretend import device


def run_ranks(check: Callable[..., Any], *, args: Sequence[Any] = (), **more: Any) -> list[Any]:
    """Do as `launchers.run_ranks`, with the device in each rank."""
    return launchers.run_ranks(on_device, args=(check, *args), **more)


def on_device(check: Callable[..., Any], *args: Any) -> Any:
    """Run a check; for ranks."""
    device.install()
    return check(*args)
