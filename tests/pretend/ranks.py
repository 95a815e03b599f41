"""Start ranks that have the pretend device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from tempfile import TemporaryDirectory
from typing import Any

import launchers

from pretend import device


def run_ranks(
    check: Callable[..., Any], *, num_processes: int, args: Sequence[Any] = (), **more: Any
) -> list[Any]:
    """Do as `launchers.run_ranks`, with a device for each rank, and two at least, which no other may use."""
    with TemporaryDirectory() as owners:
        env = {"PRETEND_DEVICES": str(max(2, num_processes)), "PRETEND_OWNERS": owners} | more.pop("env", {})
        return launchers.run_ranks(on_device, num_processes=num_processes, args=(check, *args), env=env, **more)


def on_device(check: Callable[..., Any], *args: Any) -> Any:
    """Run a check; for ranks."""
    device.install()
    return check(*args)
