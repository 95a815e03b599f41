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
from typing import Any, NamedTuple

OPERATOR, ON_DEVICE = "cpu_op", ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of events."""
LAUNCH = "External id"
"""A number that an operator shares with what it had a GPU do."""


class Operator(NamedTuple):
    """All calls of one operator, without the operators that it calls."""

    calls: int = 0
    host_us: float = 0.0
    device_us: float = 0.0

    def plus(self, other: Operator) -> Operator:
        """Return the sum of two operators' calls and times."""
        return Operator(self.calls + other.calls, self.host_us + other.host_us, self.device_us + other.device_us)


def operators(events: Iterable[Mapping[str, Any]], counts: Callable[[float], bool]) -> dict[str, Operator]:
    """Return the operators of a trace, by name.

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
    found: dict[str, Operator] = {}
    for calls in threads.values():
        for call, own_us in own_times(calls):
            if counts(call["ts"]):
                its = Operator(1, own_us, device_us[call.get("args", {}).get(LAUNCH)])
                found[call["name"]] = found.get(call["name"], Operator()).plus(its)
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
