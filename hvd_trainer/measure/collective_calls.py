"""Count the collectives that the user's own code calls, such as `dist.all_reduce`, by the line of the call."""

from __future__ import annotations

import functools
import importlib
import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType, ModuleType
from typing import Any

import torch.distributed

from hvd_trainer.measure.stack_record import CallCount, Place, owner_of
from hvd_trainer.utils.import_hooks import ImportHooks, wrap
from hvd_trainer.utils.tensors import tensors_in

OF_TORCH = (
    *("all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "gather", "scatter", "barrier"),
    *("reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "all_gather_object"),
    *("gather_object", "broadcast_object_list", "monitored_barrier"),
)
OF_HOROVOD = (
    *("allreduce", "allreduce_", "allreduce_async", "allreduce_async_", "grouped_allreduce", "grouped_allreduce_"),
    *("allgather", "allgather_async", "broadcast", "broadcast_", "broadcast_async", "broadcast_async_", "barrier"),
    *("alltoall", "alltoall_async", "allgather_object", "broadcast_object", "reducescatter"),
)
ENGINES = (
    *("/torch/nn/parallel/", "/torch/optim/", "/horovod/torch/optimizer.py", "/hvd_trainer/hvd/optimizer.py"),
    *("/hvd_trainer/training/loop.py", "/hvd_trainer/backends/buckets.py"),
    *("/torch/nn/modules/", "/torch/distributed/algorithms/"),
)
"""Files of what exchanges by itself: a call that comes through them is not the user's own."""
MAX_TIMED = 4000
"""Calls of a place whose seconds are kept."""


class CollectiveCalls:
    """Counts the calls from `install` on; those within another one are a part of it."""

    def __init__(self) -> None:
        self.counts: dict[tuple[str, Place], CallCount] = {}
        """by function and place"""
        self._numbers: dict[tuple[str, Place], int] = {}
        self._inside = threading.local()

    def install(self) -> None:
        """Replace the functions by ones that count."""
        # torch.compile knows collectives by the functions that are there when it is imported.
        importlib.import_module("torch.distributed._functional_collectives")
        self._wrap(torch.distributed, OF_TORCH)
        names = dict.fromkeys(("horovod.torch", "hvd_trainer.hvd"), lambda module: self._wrap(module, OF_HOROVOD))
        ImportHooks(aliases={}, absent={}, after=names).install()

    def clear(self) -> None:
        """Forget what was counted."""
        self.counts = {}

    def _wrap(self, module: ModuleType, names: Sequence[str]) -> None:
        for name in names:
            if hasattr(module, name):
                wrap(name, functools.partial(self._count, name), module)

    def _count(self, name: str, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        # In a graph of torch.compile nothing can be counted, and anything else here would break it.
        if torch.compiler.is_compiling() or getattr(self._inside, "one", False):
            return function(*args, **kwargs)
        self._inside.one = True
        try:
            place = user_place(sys._getframe(1))
            if place is None:
                return function(*args, **kwargs)
            began = time.perf_counter()
            result = function(*args, **kwargs)
            # An asynchronous call returns at once: its seconds are not those of the collective.
            is_async = "async" in name or isinstance(result, torch.distributed.Work)
            self._add((name, place), (args, kwargs), None if is_async else time.perf_counter() - began)
            return result
        finally:
            self._inside.one = False

    def _add(self, key: tuple[str, Place], arguments: Any, seconds: float | None) -> None:
        number = self._numbers[key] = self._numbers.get(key, -1) + 1
        entry = self.counts.setdefault(key, CallCount(key[0], first=number))
        entry.calls += 1
        entry.bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(arguments))
        if seconds is not None and len(entry.seconds) < MAX_TIMED:
            entry.seconds.append(seconds)


def user_place(frame: FrameType | None) -> Place | None:
    """Return the innermost place of the user's code from a frame outwards; None where an engine calls."""
    while frame is not None:
        file = frame.f_code.co_filename
        if any(part in file for part in ENGINES):
            return None
        if owner_of(file) == "user":
            return frame.f_code, frame.f_lasti
        frame = frame.f_back
    return None
