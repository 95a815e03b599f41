"""Let `env://` find the ranks of launchers that do not set PyTorch's variables."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.rendezvous import _rendezvous_handlers  # no function replaces a handler

from hvd_trainer.launch.launchers import TORCH_NAMES, find_launcher
from hvd_trainer.launch.world import detect
from hvd_trainer.rendezvous.connect import open_store

Handler = Callable[..., Iterator[tuple[dist.Store, int, int]]]


def register() -> None:
    """Put a handler for `env://` before PyTorch's own, once."""
    handler = _rendezvous_handlers["env"]
    if not isinstance(handler, EnvHandler):
        _rendezvous_handlers["env"] = EnvHandler(handler)


class EnvHandler:
    """Handle `env://`: by the launcher's variables where they are not PyTorch's, which go to its own handler.

    Args:
        torch_handler: PyTorch's.
    """

    def __init__(self, torch_handler: Handler) -> None:
        self._torch_handler = torch_handler

    def __call__(self, url: str, timeout: timedelta, **kwargs: Any) -> Iterator[tuple[dist.Store, int, int]]:
        """Yield the store that all ranks share, this process's rank and the number of ranks.

        Raises:
            LaunchError: the launcher's variables are incomplete, or the ranks could not meet.
        """
        launcher = find_launcher(os.environ)
        if launcher is None or launcher.rank in TORCH_NAMES:
            yield from self._torch_handler(url, timeout=timeout, **kwargs)
            return
        world = detect(os.environ)
        store = open_store(world, os.environ, timeout_s=timeout.total_seconds()).store
        yield store, world.rank, world.size
        raise RuntimeError(f"The ranks of {launcher.name} cannot meet a second time by env://.")
