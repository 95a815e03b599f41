"""Threads that may touch an accelerator."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from hvd_trainer.utils import accelerator


def start_thread(
    run: Callable[..., object], name: str, *args: Any, device: torch.device | None = None
) -> threading.Thread:
    """Start a daemon thread, whose current device is one that this process uses.

    A thread begins on device 0, and what asks the driver there, be it for an event of another device, may create a
    context on it: some 400 MB of another rank's GPU.

    Args:
        device: None: that of this thread.
    """
    chosen = accelerator.in_use() if device is None else device

    def begin() -> None:
        if chosen is not None:
            accelerator.set_current(chosen)
        run(*args)

    thread = threading.Thread(target=begin, name=name, daemon=True)
    thread.start()
    return thread
