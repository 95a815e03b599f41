"""The collectives that this process has called, whoever carries them out: what ranks wait for each other in.

PyTorch's flight recorder has the last 2,000 of Gloo and NCCL, also those that DDP makes in C++. All ranks of a
group number its collectives alike. Horovod, and its API on torch.distributed, match them by name instead.
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
MAX_PER_GROUP = 8
"""How many collectives of a group `recent` returns."""


class CollectiveCall(NamedTuple):
    """One call of a collective by this process."""

    group: str
    """the group's name and what carries it, alike on all its ranks"""
    number: int
    """among those of the group that this process has begun, from 1"""
    text: str
    """what was called, with which shapes"""
    is_done: bool
    ranks: tuple[int, ...] = ()
    """of the group; empty: unknown"""
    is_named: bool = False
    """whether ranks match it by its text, instead of by its number"""
    since: float = 0.0
    """when it began, by `time.monotonic`; 0: unknown"""

    def is_missing_in(self, others: list[CollectiveCall]) -> bool:
        """Return whether a rank that has begun these has not begun this one."""
        own_group = [other for other in others if other.group == self.group]
        if self.is_named:
            return all(other.is_done or other.text != self.text for other in own_group)
        return max((other.number for other in own_group), default=0 if self.ranks else self.number) < self.number


sources: list[Callable[[], list[CollectiveCall]]] = []
"""Return the last collective of each group, and all under way, of a backend that PyTorch does not record."""


def recent() -> list[CollectiveCall]:
    """Return each group's last collectives, and those that are under way; for NCCL those in the GPU's queue."""
    groups: dict[str, list[CollectiveCall]] = {}
    for call in _calls():
        groups.setdefault(call.group, []).append(call)
    return [
        call
        for group in groups.values()
        for place, call in enumerate(reversed(group))
        if place < MAX_PER_GROUP or not call.is_done
    ]


def unfinished() -> list[CollectiveCall]:
    """Return the collectives that are under way."""
    return [call for call in _calls() if not call.is_done]


def oldest() -> float | None:
    """Return when the oldest collective under way began, of those of `sources`; None if there is none."""
    times = [call.since for source in sources for call in source() if not call.is_done]
    return min(filter(None, times), default=None)


def progress() -> list[Any]:
    """Return a value that changes whenever a collective begins or ends; takes microseconds."""
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


def _calls() -> list[CollectiveCall]:
    """Return all collectives that are known, in order; what the driver does not answer for in time is left out."""
    asked = start_in_thread(_recorded, "flight-recorder")
    wait([asked], ANSWER_TIMEOUT_S)
    recorded = asked.result() if asked.done() and asked.exception() is None else []
    return [*recorded, *(call for source in sources for call in source())]


def _recorded() -> list[CollectiveCall]:
    members = _members()
    entries = [
        entry
        for dump in _recorders()
        for entry in json.loads(dump(includeCollectives=True, onlyActive=False)).get("entries", [])
    ]
    # Groups without a name are those of `hvd`, which is one of `sources`.
    return [_call(entry, members) for entry in entries if not entry.get("is_p2p") and entry["process_group"][0]]


def _members() -> dict[str, tuple[int, ...]]:
    """Return the ranks of each group of torch.distributed, by its name."""
    world: Any = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    if world is None:
        return {}
    # Copies: the main thread adds groups.
    ranks = dict(world.pg_group_ranks)
    return {name: tuple(sorted(ranks.get(group, ()))) for group, name in dict(world.pg_names).items()}


def _call(entry: dict[str, Any], members: dict[str, tuple[int, ...]]) -> CollectiveCall:
    name, group, number = entry["profiling_name"], entry["process_group"][0], entry["collective_seq_id"]
    carrier, _, kind = name.partition(":")
    dtypes = entry.get("input_dtypes", ["tensors"])
    shapes = [f"{dtype.lower()}{shape}" for dtype, shape in zip(dtypes, entry["input_sizes"], strict=False)]
    return CollectiveCall(
        group=f"{carrier}:{group}",
        number=number,
        text=f"{kind}{' of ' if shapes else ''}{', '.join(shapes)}, number {number} of group {group}",
        is_done=entry.get("retired", False) or entry["state"] == "completed",
        ranks=members.get(group, ()),
    )
