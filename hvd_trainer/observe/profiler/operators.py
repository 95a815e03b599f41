"""How much time each operator took by itself, from PyTorch's own trace.

    aten::linear  |======================|          own time of linear: its own less that of the operators
    aten::t          |==|                           that it calls, here t and addmm
    aten::addmm            |===========|

The profiler's `key_averages` says the same, but takes a minute for a trace that is read in a few seconds.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import itemgetter
from typing import Any

OPERATOR, ON_DEVICE = "cpu_op", ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of events."""
LAUNCH = "External id"
"""A number that an operator shares with what it had a GPU do."""


def operators(events: Iterable[Mapping[str, Any]], counts: Callable[[float], bool]) -> dict[str, Counter[str]]:
    """Return `calls`, `host_us` and `device_us` by operator, without the operators that each calls.

    Args:
        counts: whether a call does that began at this time, in microseconds of the trace.
    """
    threads: dict[Any, list[Mapping[str, Any]]] = defaultdict(list)
    device_us: Counter[Any] = Counter()
    for event in events:
        category = event.get("cat")
        if category == OPERATOR:
            threads[event["tid"]].append(event)
        elif category in ON_DEVICE and LAUNCH in event.get("args", ()):
            device_us[event["args"][LAUNCH]] += event["dur"]
    found: dict[str, Any] = {name: Counter() for name in ("calls", "host_us", "device_us")}
    for thread in threads.values():
        for call, own_us in own_times(thread):
            if counts(call["ts"]):
                found["calls"][call["name"]] += 1
                found["host_us"][call["name"]] += own_us
                found["device_us"][call["name"]] += device_us[call.get("args", {}).get(LAUNCH)]
    return found


def own_times(calls: list[Mapping[str, Any]]) -> Iterator[tuple[Mapping[str, Any], float]]:
    """Yield each call of one thread with its time excluding nested calls; nested calls come first."""
    running: list[tuple[float, float, Mapping[str, Any]]] = []  # when it ends, and its own time so far
    for call in sorted(sorted(calls, key=itemgetter("dur"), reverse=True), key=itemgetter("ts")):
        began, duration = call["ts"], call["dur"]
        while running and running[-1][0] <= began:
            _, own, ended = running.pop()
            yield ended, own
        if running:
            end, own, outer = running.pop()
            # What goes on after the call that began it, such as an exchange, is not taken from it twice.
            running.append((end, own - min(duration, end - began), outer))
        running.append((began + duration, duration, call))
    for _, own, call in reversed(running):
        yield call, own
