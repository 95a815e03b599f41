"""Let `env://` find the ranks of launchers that do not set PyTorch's variables."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.rendezvous import _rendezvous_handlers  # no function replaces a handler

from hvd_trainer.launch.launchers import TORCH_NAMES, find_launcher
from hvd_trainer.launch.world import detect
from hvd_trainer.rendezvous.connect import open_store

_torch_handler = _rendezvous_handlers["env"]


def register() -> None:
    """Put `find_ranks` before PyTorch's own handler for `env://`."""
    _rendezvous_handlers["env"] = find_ranks


def find_ranks(url: str, timeout: timedelta, **kwargs: Any) -> Iterator[tuple[dist.Store, int, int]]:
    """Yield the store that all ranks share, this process's rank and the number of ranks.

    By the launcher's variables where they are not PyTorch's, which go to its own handler.

    Raises:
        LaunchError: the launcher's variables are incomplete, or the ranks could not meet.
    """
    launcher = find_launcher(os.environ)
    if launcher is None or launcher.rank in TORCH_NAMES:
        yield from _torch_handler(url, timeout=timeout, **kwargs)
        return
    world = detect(os.environ)
    store = open_store(world, os.environ, timeout_s=timeout.total_seconds()).store
    yield store, world.rank, world.size
    raise RuntimeError(f"The ranks of {launcher.name} cannot meet a second time by env://.")
