"""The exchanges that this process has begun in groups of torch.distributed, whoever carries them out.

PyTorch's flight recorder has the last 2,000 of Gloo and NCCL, also those that DDP makes in C++. All ranks of a
group number its exchanges alike: one that a rank has not begun before it ended is never complete on the others.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from concurrent.futures import wait
from functools import partial
from typing import Any, NamedTuple

from hvd_trainer.utils.process import start_in_thread

NCCL_SINCE_2_15 = "nccl2"
"""the name of PyTorch's newer class of groups for NCCL, and of what it records"""
ANSWER_TIMEOUT_S = 2.0


class Exchange(NamedTuple):
    """One exchange of this process."""

    group: str
    """the group's name and what carries it, alike on all its ranks"""
    number: int
    """among those of the group, from 1"""
    text: str
    is_done: bool


sources: list[Callable[[], list[Exchange]]] = []
"""Return the last exchange of each group, and all under way, of a backend that PyTorch does not record."""


def begun() -> dict[str, int]:
    """Return the number of the last exchange of each group."""
    return {exchange.group: exchange.number for exchange in _exchanges()}


def unfinished() -> list[Exchange]:
    """Return the exchanges that are under way; for NCCL those in the GPU's queue."""
    return [exchange for exchange in _exchanges() if not exchange.is_done]


def progress() -> list[Any]:
    """Return a value that differs from an earlier one if an exchange has begun or ended since; in microseconds."""
    dumps = [dump(includeCollectives=False, onlyActive=False) for dump in _recorders()]
    return [*dumps, *(source() for source in sources)]


def _recorders() -> list[Callable[..., bytes]]:
    """Return what gives the records of Gloo, and of each of PyTorch's classes for NCCL that there is."""
    module: Any = sys.modules.get("torch._C._distributed_c10d")
    recorders = [getattr(module, name, None) for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json")]
    if hasattr(module, "ProcessGroupNCCL2"):
        recorders.append(partial(module._dump_fr_trace_json, backend=NCCL_SINCE_2_15))
    if any(recorders):
        from hvd_trainer.utils import accelerator  # imports torch, as those have

        device = accelerator.in_use()
        if device is not None:
            accelerator.set_current(device)  # they query events
    return [recorder for recorder in recorders if recorder is not None]


def _exchanges() -> list[Exchange]:
    """Return all exchanges that are known, in order; what the driver does not answer for in time is left out."""
    asked = start_in_thread(_recorded, "flight-recorder")
    wait([asked], ANSWER_TIMEOUT_S)
    recorded = asked.result() if asked.done() and asked.exception() is None else []
    return [*recorded, *(exchange for source in sources for exchange in source())]


def _recorded() -> list[Exchange]:
    entries = [
        entry
        for dump in _recorders()
        for entry in json.loads(dump(includeCollectives=True, onlyActive=False)).get("entries", [])
    ]
    return [_exchange(entry) for entry in entries if not entry.get("is_p2p")]


def _exchange(entry: dict[str, Any]) -> Exchange:
    name, group, number = entry["profiling_name"], entry["process_group"][0], entry["collective_seq_id"]
    return Exchange(
        group=f"{name.partition(':')[0]}:{group}",
        number=number,
        text=f"{name} of {entry['input_sizes']}, number {number} of group {group}",
        is_done=entry.get("retired", False) or entry["state"] == "completed",
    )
