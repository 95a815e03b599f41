"""Horovod's operations under way, by the names by which it matches those of other ranks: for the monitor."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

from hvd_trainer.faults import collectives
from hvd_trainer.faults.collectives import CollectiveCall
from hvd_trainer.utils.import_hooks import wrap

KINDS = ("allreduce", "allgather", "broadcast", "alltoall", "reducescatter")
MIN_LIMIT = 1000
"""How many names are kept, those of operations that are done among them, before the latter are dropped."""


class Operations:
    """Notes the name of each operation that a process asks Horovod for.

    Args:
        module: `horovod.torch.mpi_ops`.
    """

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._titles: dict[int, tuple[str, tuple[int, ...], float]] = {}
        """name, ranks and time of begin, by handle"""
        self._limit = MIN_LIMIT
        self._num_begun = 0
        for kind in (*KINDS, *(f"grouped_{kind}" for kind in KINDS)):
            if hasattr(module, f"_{kind}_async"):
                wrap(f"_{kind}_async", functools.partial(self._begin, kind=kind.removeprefix("grouped_")), module)

    def _begin(self, original: Callable[..., int], *args: Any, kind: str, **kwargs: Any) -> int:
        handle = original(*args, **kwargs)
        values = [*args, *kwargs.values()]
        name = next((value for value in values if isinstance(value, str)), f"noname.{handle}")
        ranks = next((tuple(value.ranks) for value in values if getattr(value, "ranks", None)), ())
        if len(self._titles) >= self._limit:
            under_way = self._module._handle_map
            self._titles = {known: title for known, title in self._titles.items() if known in under_way}
            # Twice as many as are under way: the cost of an operation does not depend on their number.
            self._limit = max(MIN_LIMIT, 2 * len(self._titles))
        self._titles[handle] = f"{kind}.{name}", ranks, time.monotonic()
        self._num_begun += 1
        return handle

    def calls(self) -> list[CollectiveCall]:
        """Return the operations under way, and the number of all."""
        handles = self._module._handle_map
        under_way = [
            CollectiveCall("horovod", 0, title, False, ranks, True, since)
            for handle, (title, ranks, since) in list(self._titles.items())
            if handle in handles and not self._is_done(handle)
        ]
        return [CollectiveCall("horovod", self._num_begun, "", True), *under_way]

    def _is_done(self, handle: int) -> bool:
        try:
            return bool(self._module.poll(handle))
        except (RuntimeError, ValueError):  # its result has just been taken
            return True


@functools.cache
def tell_monitor(module: ModuleType) -> None:
    """Let the monitor know what Horovod is asked for from now on."""
    collectives.sources.append(Operations(module).calls)
