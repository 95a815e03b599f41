"""Find what the user's own code adds to a step: its collectives, what only one rank does, the start of loaders.

Pure functions, as those of causes.py.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from hvd_trainer.measure.formats import number
from hvd_trainer.tools.diagnose.evidence import SIGMAS, Cause, Evidence, argmax, ms
from hvd_trainer.tools.diagnose.profile import RankProfile, Seconds, Stack, calls_at, hottest_line, together_s
from hvd_trainer.tools.diagnose.roles import LOADER, LONE, START, WAITING
from hvd_trainer.utils.text import plural

MIN_STARTS = 2
"""Starts of a loader's processes in a run from which they are a cause."""
MANY_CALLS = 1.5
"""Calls of a collective in a step from which they are better one call."""


def of_starts(evidence: Evidence) -> Iterator[Cause]:
    """Yield what ranks wait until the loader's processes are started again, such as in each epoch."""
    profile = min(evidence.profiles, key=starts_s)
    seconds, times = starts_s(profile), profile.starts.times
    if times < MIN_STARTS:
        return
    line = hottest_line((s for s in profile.main() if any(f.file.endswith(LOADER) for f in s.frames)), "whole")
    where = str(line or "the DataLoader")
    text = (
        f"{times} times in {plural(profile.steps, 'step')} the loader's processes are started again "
        f"({profile.starts.processes} in all), which takes {ms(seconds * profile.steps / times)} ms each time, at "
        f"{where}"
    )
    error = seconds / math.sqrt(times) / SIGMAS
    yield Cause("loader starts", seconds, error, text, line, details={"where": where, "times": times})


def starts_s(profile: RankProfile) -> float:
    """Return the seconds of a step that starting loader processes takes, with the late batches after it."""
    if profile.starts.times < MIN_STARTS:
        return 0.0
    return sum(s.whole.wall if s.role == START else s.slow.wall for s in profile.main("data", START))


def of_collectives(evidence: Evidence, limit: float, queued: float) -> Iterator[Cause]:
    """Yield what collectives take that the user's own code calls, by their lines: of the rank that waits least.

    Args:
        limit: seconds of a step from which a cause is worth an action.
        queued: seconds that other programs make a rank wait, and so the ranks that wait for that one.
    """
    lines: dict[tuple[str, int], list[list[Stack]]] = defaultdict(lambda: [[] for _ in evidence.profiles])
    for rank, profile in enumerate(evidence.profiles):
        for stack in profile.main("collective"):
            frame = [f for f in stack.frames if f.owner == "user"][-1]
            lines[frame.location][rank].append(stack)
    for by_rank in lines.values():
        times = [sum((stack.typical for stack in stacks), Seconds()) for stacks in by_rank]
        rank = argmax([-spent.own for spent in times])
        spent, profile = times[rank], evidence.profiles[rank]
        line = hottest_line((stack for stacks in by_rank for stack in stacks), "whole")
        if line is None:
            continue
        counts = [call for record in profile.records for call in calls_at(record, line.frame)]
        calls = sum(count.calls for count in counts)
        details: dict[str, Any] = {
            "calls": calls / profile.steps,
            "bytes": sum(count.bytes for count in counts) / max(calls, 1),
            "function": max(counts, key=lambda count: count.calls).function if counts else "",
        }
        each_s = together_s(evidence.profiles, line.frame)
        alone_s = max(0.0, spent.own - queued)
        seconds = alone_s if each_s is None else min(spent.own, each_s * details["calls"])
        if seconds >= limit:
            text = f"{ms(seconds)} of {ms(evidence.step_s)} ms: {line}; {_describe(details)}"
            yield Cause("collective", seconds, spent.error, text, line, details=details)


def _describe(details: Mapping[str, Any]) -> str:
    """Return how often a collective is called, and how much it sends."""
    count, size = details["calls"], details["bytes"]
    if not count:
        return "calls that were not counted"
    often = f"{count:.0f} calls a step" if count > MANY_CALLS else "a call in each step"
    if count < 1 / MANY_CALLS:
        often = f"a call every {1 / count:.3g} steps"
    return often + (f" of {number(size)} bytes" if size else "")


def of_lone(evidence: Evidence) -> Iterator[Cause]:
    """Yield what only one rank does, while the others wait for it."""
    for rank, profile in enumerate(evidence.profiles):
        own = list(profile.main(LONE))
        seconds, line = sum(stack.whole.own for stack in own), hottest_line(own, "whole")
        if line is None:
            continue
        # Slow steps are not in the tables.
        waited = max(
            other.hiccups_s + sum(evidence.tables[number][role].own for role in WAITING)
            for number, other in enumerate(evidence.profiles)
            if number != rank
        )
        text = (
            f"only rank {rank} does this: {ms(seconds)} of {ms(evidence.step_s)} ms at {line}; the others wait "
            f"for it in the next exchange ({ms(waited)} ms a step in all)"
        )
        lost = min(seconds, waited)
        yield Cause("lone", lost, lost / math.sqrt(profile.blocks), text, line, rank)
