"""Find what the user's own code adds to a step: its collectives, what only one rank does, the start of loaders.

Pure functions, as those of causes.py.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator

from hvd_trainer.measure.formats import number
from hvd_trainer.tools.diagnose.evidence import SIGMAS, Cause, Evidence, argmax, ms
from hvd_trainer.tools.diagnose.profile import (
    LOADER,
    LONE,
    START,
    WAITING,
    Calls,
    RankProfile,
    Seconds,
    Stack,
    hottest_line,
    together_s,
)
from hvd_trainer.utils.text import plural

MIN_STARTS = 2
"""Starts of a loader's processes in a run from which they are a cause."""
MANY_CALLS = 1.5
"""Calls of a collective in a step from which they are better one call."""

Line = tuple[str, int]


def of_starts(evidence: Evidence) -> Iterator[Cause]:
    """Yield what ranks wait until the loader's processes are started again, such as in each epoch."""
    rank = argmax([-starts_s(profile) for profile in evidence.profiles])
    profile, seconds = evidence.profiles[rank], starts_s(evidence.profiles[rank])
    times, processes = (sum(getattr(one, name) for one in profile.starts) for name in ("times", "processes"))
    if times < MIN_STARTS:
        return
    own = [s for s in profile.main() if any(frame.file.endswith(LOADER) for frame in s.frames)]
    line = hottest_line(own, profile, whole=True)
    where = str(line or "the DataLoader")
    text = (
        f"{times} times in {plural(profile.steps, 'step')} the loader's processes are started again "
        f"({processes} in all), which takes {ms(seconds * profile.steps / times)} ms each time, at {where}"
    )
    error = seconds / math.sqrt(times) / SIGMAS
    yield Cause("loader starts", seconds, error, text, line, details={"where": where, "times": times})


def starts_s(profile: RankProfile) -> float:
    """Return the seconds of a step that starting loader processes takes, with the late batches after it."""
    if sum(one.times for one in profile.starts) < MIN_STARTS:
        return 0.0
    late = sum(
        stack.raw.wall_s if stack.role == START else profile.slow_s(stack)
        for stack in profile.main()
        if stack.role in ("data", START)
    )
    return max(profile.starts_s, late / profile.steps)


def of_collectives(evidence: Evidence, limit: float, queued: float) -> Iterator[Cause]:
    """Yield what collectives take that the user's own code calls, by their lines: of the rank that waits least.

    Args:
        evidence: of the normal runs.
        limit: seconds of a step from which a cause is worth an action.
        queued: seconds that other programs make a rank wait, and so the ranks that wait for that one.
    """
    times: dict[Line, list[Seconds]] = defaultdict(lambda: [Seconds() for _ in evidence.profiles])
    stacks: dict[Line, list[Stack]] = defaultdict(list)
    for rank, profile in enumerate(evidence.profiles):
        for stack in profile.main():
            if stack.role == "collective":
                frame = [f for f in stack.frames if f.owner == "user"][-1]
                place = frame.file, frame.line
                times[place][rank] += profile.seconds_of(stack)
                stacks[place].append(stack)
    for place, through in stacks.items():
        rank = argmax([-seconds.own for seconds in times[place]])
        spent, profile = times[place][rank], evidence.profiles[rank]
        line = hottest_line(through, profile, whole=True)
        if line is None:
            continue
        calls = profile.calls_at(line.frame)
        seconds, each_s = max(0.0, spent.own - queued), together_s(evidence.profiles, line.frame)
        if each_s is not None:
            seconds = min(spent.own, each_s * calls.per_step)
        if seconds >= limit:
            text = f"{ms(seconds)} of {ms(evidence.step_s)} ms: {line}; {_describe(calls)}"
            details = {"calls": calls.per_step, "bytes": calls.bytes, "function": calls.function}
            yield Cause("collective", seconds, spent.error, text, line, details=details)


def _describe(calls: Calls) -> str:
    """Return how often a collective is called, and how much it sends."""
    count = calls.per_step
    if not count:
        return "calls that were not counted"
    often = f"{count:.3g} calls a step" if count > MANY_CALLS else "a call in each step"
    if count < 1 / MANY_CALLS:
        often = f"a call every {1 / count:.3g} steps"
    return often + (f" of {number(calls.bytes)} bytes" if calls.bytes else "")


def of_lone(evidence: Evidence) -> Iterator[Cause]:
    """Yield what only one rank does, while the others wait for it."""
    for rank, profile in enumerate(evidence.profiles):
        own = [stack for stack in profile.main() if stack.role == LONE]
        seconds = sum(max(s.raw.wall_s - s.raw.queued_s - s.raw.gil_s, 0.0) for s in own) / profile.steps
        line = hottest_line(own, profile, whole=True)
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
