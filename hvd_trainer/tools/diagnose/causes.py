"""Find the causes of lost time by the evidence of the normal run, and of runs in which parts were left out.

The normal run tells, for each rank, the seconds of a step by role and line (profile.py). A role's time that all
ranks spend is the job's; what one rank spends beyond the others makes them wait. Of the other runs, with T(...)
the time of a step:

    exchange     T(normal) - T(without exchange) - waiting for the slowest rank; T without the user's collectives
    overlap      that, or what the exchange takes by itself, less what the backward pass could not hide of it
    contention   T(computing, quickest of N ranks without exchange) - T(computing, one rank alone)
    overhead     2 T(alone) - T(alone, twice the batch), less what lines of the user take in each step

Pure functions: nothing is started here.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import mean, median
from typing import Any

from hvd_trainer.measure.stack_record import MAIN, WORKER
from hvd_trainer.tools.diagnose.evidence import (
    ALONE,
    NO_EXCHANGE,
    NORMAL,
    SIGMAS,
    TWICE,
    Cause,
    Evidence,
    argmax,
    ms,
)
from hvd_trainer.tools.diagnose.own_code import of_collectives, of_lone, of_starts, starts_s
from hvd_trainer.tools.diagnose.profile import Blame, RankProfile, Seconds, Stack, hottest_line, library_line
from hvd_trainer.tools.diagnose.python_loops import loop_around
from hvd_trainer.tools.diagnose.roles import LONE, START, WAITING
from hvd_trainer.utils.text import plural

ROLES = ("data", "loss", "backward", "update", "metric", "callback", "script", "own forward", "model")
"""Parts of a step's time, without the exchange."""
OF_THE_MACHINE = ("programs", "throttled", "stolen")
"""Kinds of causes that are none of the job's: its own are compared with a step without them."""
MIN_QUIET = 0.5
"""Fraction of a step that is taken for quiet at least: what is small beside other programs may be their own."""
COUNTED_ERROR = 0.05
"""Relative standard error of what the system counts in a run."""
MIN_SHARE = 0.05
"""Fraction of a step below which a cause is not worth an action."""
MIN_LIBRARY_SHARE = 0.15
"""Fraction of a step from which an update, loss or metric is a cause that spends its time in libraries only."""
CALLS = (".step", "loss", "cross_entropy")
"""Ends of calls by which a script's loop enters a library for it."""
MIN_OTHER_CORES = 0.15
"""Cores that other programs use, from which they can be a cause."""
MIN_MORE = 0.03
"""Fraction by which a rank that has more to do must have more elements."""
MAX_LONGER = 3.0
"""How many times this fraction it may take longer for them."""
EVERY_STEP = ("model", "own forward", "backward", "update", "loss")
"""Roles of what a step cannot do without."""
MIN_SWAPPED = 1000
"""Pages that go to the swap or come from it in a run, from which it is a cause."""
BUCKETS_MB = (1, 4, 12, 25, 64, 128)
"""Sizes of buckets of gradients that may be advised."""


def find_causes(evidence: Evidence) -> list[Cause]:
    """Return the causes that are worth an action and more than the noise, the largest first."""
    return [cause for cause in find_candidates(evidence) if cause.is_clear]


def find_candidates(evidence: Evidence) -> list[Cause]:
    """Return the causes that are worth an action, also those within the noise, the largest first."""
    causes = list(_of_limits(evidence))
    causes += _of_queue(evidence, _sum(causes, "throttled"))
    limit = MIN_SHARE * quiet_s(evidence, causes)
    causes += _of_roles(evidence, limit, is_swapping=_sum(causes, "swap") > 0)
    causes += [
        *of_starts(evidence),
        *of_collectives(evidence, limit, _sum(causes, "programs")),
        *of_lone(evidence),
    ]
    causes += [*_of_stragglers(evidence, limit), *_of_gil(evidence), *_of_hiccups(evidence)]
    for difference in (_of_exchange, _of_contention, _of_overhead):
        causes += difference(evidence, causes)
    return sorted((cause for cause in causes if cause.seconds >= limit), key=lambda cause: -cause.seconds)


def leading(causes: Sequence[Cause]) -> list[Cause]:
    """Return the largest cause, and the largest of the job's own if that is another one."""
    own = [cause for cause in causes if cause.kind not in OF_THE_MACHINE]
    return [*causes[:1], *(cause for cause in own[:1] if cause is not causes[0])]


def quiet_s(evidence: Evidence, known: Sequence[Cause]) -> float:
    """Return the seconds of a step without what the machine's other programs and limits have taken."""
    return max(evidence.step_s - _sum(known, *OF_THE_MACHINE), MIN_QUIET * evidence.step_s)


def _sum(causes: Sequence[Cause], *kinds: str) -> float:
    return sum(cause.seconds for cause in causes if cause.kind in kinds)


def _of_roles(evidence: Evidence, limit: float, is_swapping: bool) -> Iterator[Cause]:
    """Yield what all ranks spend outside of the exchange, and of the model what they wait in it.

    Args:
        limit: seconds of a step from which a cause is worth an action.
        is_swapping: whether the machine swaps: then that is what it waits for, but for data.
    """
    for role in ROLES:
        costs = [table[role] for table in evidence.tables]
        rank = argmax([-cost.own for cost in costs])
        profile, cost = evidence.profiles[rank], costs[rank]
        line = hottest_line(profile.main(role))
        in_lines = line.seconds if line else 0.0
        seconds, kind, about = cost.own, role, ""
        if role == "own forward":
            # What it computes is the training itself; what it waits can be taken out of the step.
            kind, seconds = ("script", cost.blocked) if cost.waits else ("computing", cost.own)
        elif role == "model":
            seconds = cost.blocked
        if role in ("own forward", "model", "backward") or (role == "script" and line is not None):
            seconds = min(seconds, in_lines)
        is_model = role in ("own forward", "model") and line is not None and not cost.waits
        if is_model and line is not None and loop_around(line.frame.file, line.frame.line) is not None:
            kind, seconds = "loop", _through_s(profile.main(role), line)
        if is_swapping and role != "data":
            seconds = min(seconds, cost.cpu * (1 - profile.in_kernel))
        is_own = line is not None or role == "data"
        if role in ("loss", "update", "metric") and line is not None and line.frame.call.endswith(CALLS):
            is_own = False  # the script's own optimizer.step(), say
        is_training = kind in ("computing", "loop")  # which computes what the training needs
        if seconds < limit * (1 if is_own and not is_training else MIN_LIBRARY_SHARE / MIN_SHARE):
            continue
        where: object = line or library_line(profile.main(role)) or role
        if role == "data":
            fetching, about = _fetching(profile, cost)
            kind = "data computes" if fetching.cpu > 0.5 * fetching.own else "data waits"
            line = _worker_line(profile) or line
            where = line or "the DataLoader"
        how = "waits" if cost.waits else "computes"
        text = f"{ms(seconds)} of {ms(evidence.step_s)} ms: {where}; it {how} (CPU time {ms(cost.cpu)} ms){about}"
        saved_s = seconds / 2 if role == "update" and line is None else seconds
        details = {"where": str(where), "saved_s": saved_s, "role": role}
        yield Cause(kind, seconds, cost.error, text, line, details=details)


def _through_s(stacks: Iterable[Stack], line: Blame) -> float:
    """Return the seconds of a step of stacks through a line."""
    places = ((stack, {frame.location for frame in stack.user_frames()}) for stack in stacks)
    return sum(stack.typical.own for stack, locations in places if line.frame.location in locations)


def _worker_line(profile: RankProfile) -> Blame | None:
    """Return the hottest line of the loader's processes; None if there are none."""
    return hottest_line(profile.loading.main(WORKER)) if profile.loading is not None else None


def _fetching(profile: RankProfile, cost: Seconds) -> tuple[Seconds, str]:
    """Return what fetching a batch takes in the user's code, and words on it."""
    text = ""
    if profile.loading is not None:
        cost = sum((stack.typical for stack in profile.loading.main() if stack.user_frames()), Seconds())
        count = plural(profile.processes, "loader process", "loader processes")
        text = f"; {count}: {cost.cpu / max(cost.own, 1e-9):.0%} of a fetch is CPU time"
    if profile.major_faults:
        text += f"; {profile.major_faults:.1f} page faults from the disk a step"
    return cost, text


def _of_stragglers(evidence: Evidence, limit: float) -> Iterator[Cause]:
    """Yield what one rank does longer than the others, of what all of them do, if it is `limit` seconds a step."""
    tables = evidence.tables
    busy = [own - table[LONE].own for own, table in zip(evidence.busy, tables, strict=True)]
    slowest = argmax(busy)
    others = [rank for rank in range(evidence.ranks) if rank != slowest]
    seconds = busy[slowest] - max((busy[rank] for rank in others), default=busy[slowest])
    if seconds < limit:
        return
    excess = {
        role: cost.own - mean(tables[rank][role].own for rank in others)
        for role, cost in tables[slowest].items()
        if role not in (*WAITING, LONE, START)
    }
    if not excess:
        return
    role = max(excess, key=excess.__getitem__)
    profile, cost = evidence.profiles[slowest], tables[slowest][role]
    line = (_worker_line(profile) if role == "data" else None) or hottest_line(profile.main(role))
    others_s = mean(busy[rank] for rank in others)
    text = f"rank {slowest} takes {ms(busy[slowest])} ms of its own a step, the others {ms(others_s)}"
    usual = mean(evidence.profiles[rank].elements for rank in others)
    is_alone = excess[role] > 0.5 * sum(value for value in excess.values() if value > 0)
    at_line = f"; {ms(excess[role])} ms more at {line}" if line is not None and is_alone else ""
    details: dict[str, Any] = {}
    more = profile.elements / usual - 1 if usual else 0.0
    # Attention takes twice as much longer as its rows are.
    if more >= MIN_MORE and more >= (busy[slowest] / max(others_s, 1e-9) - 1) / MAX_LONGER:
        kind, ratio = "more work", profile.elements / usual
        details = {"ratio": ratio, "saved_s": seconds * len(others) / evidence.ranks}
        text += f"; its batches have {ratio:.3g} times as many elements"
    elif at_line and (role != "model" or cost.waits):
        kind, details = "slow line", {"role": role}
        text += at_line
    else:
        kind = "slow rank"
        cpu = [sum(cost.cpu for name, cost in table.items() if name not in WAITING) for table in tables]
        text += (
            f"{at_line}, for batches {'of the same size' if usual else 'whose size is not seen'}; its CPU time is "
            f"{ms(cpu[slowest])} ms, that of the others {ms(mean(cpu[r] for r in others))}"
        )
        or_at = f", or at what it has to do more than the others at {line}" if at_line else ""
        or_at += "" if usual else ", or at the length of its samples"
        details, line = {"or_at": or_at}, None
    error = math.sqrt(sum(t.variance for table in tables for name, t in table.items() if name not in WAITING))
    yield Cause(kind, seconds, error, text, line, slowest, details)


def _of_gil(evidence: Evidence) -> Iterator[Cause]:
    """Yield what a main thread waits for another thread of Python."""
    gils = [sum(cost.gil for cost in table.values()) for table in evidence.tables]
    rank = argmax(gils)
    profile, seconds = evidence.profiles[rank], gils[rank]
    threads: dict[str, list[Stack]] = defaultdict(list)
    for stack in profile.stacks:
        if stack.thread != MAIN:
            threads[stack.thread].append(stack)
    if not threads:
        return
    thread = max(threads, key=lambda name: sum(stack.whole.cpu for stack in threads[name]))
    line = hottest_line(threads[thread])
    text = (
        f"the main thread of rank {rank} waits {ms(seconds)} of {ms(evidence.step_s)} ms for the GIL, which the "
        f"thread {thread!r} has: {line}"
    )
    yield Cause("gil", seconds, seconds / math.sqrt(profile.blocks), text, line, rank, {"thread": thread})


def _of_limits(evidence: Evidence) -> Iterator[Cause]:
    """Yield what a limit of the control group and the swap have taken."""
    machine = evidence.machine
    stopped = min(1.0, machine.throttled / min(evidence.cores, evidence.ranks))
    text = f"a limit of the control group stopped each rank for {stopped:.0%} of the time"
    yield Cause("throttled", stopped * evidence.step_s, COUNTED_ERROR * stopped * evidence.step_s, text)
    if machine.stolen > MIN_OTHER_CORES:
        text = f"the hypervisor gave {machine.stolen:.1f} of {plural(evidence.cores, 'core')} to other machines"
        seconds = machine.stolen / evidence.cores * evidence.step_s
        yield Cause("stolen", seconds, COUNTED_ERROR * seconds, text)
    faults = max(profile.major_faults for profile in evidence.profiles)
    if machine.swapped_pages > MIN_SWAPPED and faults >= 1:
        seconds = max(
            sum(
                cost.blocked + cost.cpu * p.in_kernel
                for role, cost in table.items()
                if role not in (*WAITING, "data")
            )
            for table, p in zip(evidence.tables, evidence.profiles, strict=True)
        )
        text = f"{machine.swapped_pages} pages went to the swap or came from it; {faults:.0f} page faults a step"
        yield Cause("swap", seconds, seconds / math.sqrt(evidence.profiles[0].blocks), text)


def _of_queue(evidence: Evidence, throttled_s: float) -> Iterator[Cause]:
    """Yield what the threads of a rank wait for a CPU, beside what a limit has taken: for whom it is busy."""
    waits = []
    for table, profile, carried_s in zip(evidence.tables, evidence.profiles, evidence.carried, strict=True):
        queued = sum(cost.queued for role, cost in table.items() if role not in WAITING)
        waits.append(queued + profile.slow_queued_s + carried_s)
    rank = argmax(waits)
    seconds = max(0.0, min(waits[rank], evidence.step_s) - throttled_s)
    text = f"the threads of rank {rank} are in the queue for a CPU for {ms(seconds)} of {ms(evidence.step_s)} ms"
    error = seconds / math.sqrt(evidence.profiles[rank].blocks)
    machine, cores = evidence.machine, plural(evidence.cores, "core")
    by_others = 0.0
    if machine.other_cores >= MIN_OTHER_CORES and sum(waits) > 0:
        # While others have a core, one thread waits for it: no more than they have used can be theirs.
        by_others = min(1.0, machine.other_cores * evidence.step_s / sum(waits))
    named = f": {machine.named}" if machine.named else ""
    about = f"{text}; other programs keep {machine.other_cores:.1f} of {cores} busy{named}"
    yield Cause("programs", seconds * by_others, error, about, details={"programs": named})
    about = f"{text}; they wait for each other: the job itself keeps {evidence.run_cores:.1f} of {cores} busy"
    kind = "pinned" if evidence.pinned else "contention"
    allowed = ", ".join(map(str, sorted(evidence.pinned)))
    details = {"allowed": allowed, "machine_cores": evidence.machine_cores, "ranks": evidence.ranks}
    yield Cause(kind, seconds * (1 - by_others), error, about, details=details)


def _of_hiccups(evidence: Evidence) -> Iterator[Cause]:
    """Yield what slow steps take beyond typical ones."""
    # The start of loader processes makes slow steps, too, but is a cause of its own.
    seconds = mean(max(0.0, profile.hiccups_s - starts_s(profile)) for profile in evidence.profiles)
    slow: list[dict[str, float]] = [defaultdict(float) for _ in evidence.profiles]
    for table, profile in zip(slow, evidence.profiles, strict=True):
        for stack in profile.main():
            table[stack.role] += stack.slow.wall
    # The rank that is to blame is the one that does not wait for others meanwhile.
    waiting_or_lone = (*WAITING, LONE, START)
    rank = argmax([sum(value for role, value in table.items() if role not in waiting_or_lone) for table in slow])
    profile, table = evidence.profiles[rank], slow[rank]
    if not profile.slow:
        return
    role = max((role for role in table if role not in waiting_or_lone), key=table.__getitem__, default="exchange")
    own = [stack for stack in profile.main() if stack.role not in waiting_or_lone and stack.slow.wall]
    seconds = max(0.0, seconds - table[LONE])
    if role == "data" and starts_s(profile):
        return  # the batches after a start are late
    line, period = hottest_line(own, "slow"), _period(profile)
    if period is None and not any(stack.user_frames() for stack in own if stack.role == role):
        return  # the machine's own, such as other programs' time slices
    size_s = profile.hiccups_s * profile.steps / len(profile.slow)
    often = f"every {period:.0f} steps" if period else "now and then"
    when = often if period else f"{plural(len(profile.slow), 'time')} in {plural(profile.steps, 'step')}"
    text = (
        f"{when} a step takes {ms(size_s)} ms longer (typical: {ms(profile.typical_s)} ms), on rank {rank} in "
        f"its {role}{'' if line is None else f': {line}'}"
    )
    details = {"often": often, "size_ms": 1000 * size_s, "where": f"its {role}"}
    if role in EVERY_STEP:
        details["advice"] = (
            f"its {role} is a part of each step, and takes {1000 * size_s:.0f} ms longer {often}: look at what "
            f"comes at these times, such as batches of another shape, garbage collection, or new memory"
        )
    error = seconds / math.sqrt(len(profile.slow)) / SIGMAS
    yield Cause("hiccups", seconds, error, text, line, None if evidence.ranks == 1 else rank, details)


def _period(profile: RankProfile) -> float | None:
    """Return after how many steps a slow one comes again; None if that is not regular, or they come in a row."""
    # Other programs make some steps slow, too, but less so.
    least = profile.typical_s + 0.5 * (max(profile.durations) - profile.typical_s)
    large = [number for number in profile.slow if profile.durations[number] > least]
    gaps = [b - a for a, b in zip(large, large[1:], strict=False)]
    usual = median(gaps) if len(gaps) >= 2 else 0
    is_regular = usual > 1 and sum(abs(gap - usual) <= 0.1 * usual for gap in gaps) > 0.6 * len(gaps)
    return usual if is_regular else None


def _of_exchange(evidence: Evidence, known: Sequence[Cause]) -> Iterator[Cause]:
    """Yield what the exchange takes beside waiting for a rank: what the backward pass could hide, and the rest."""
    if evidence.ranks < 2:
        return
    queued = _sum(known, "programs", "gil")
    least = min((table["exchange"] for table in evidence.tables), key=lambda cost: cost.own)
    # What a program beside the job makes an exchange wait is no cost of the exchange.
    seconds, error = max(0.0, least.own - queued), least.error
    text = f"{ms(least.own)} of {ms(evidence.step_s)} ms a rank waits in the exchange that ends last"
    normal, without = (evidence.figure(label, "apart_s") for label in (NORMAL, NO_EXCHANGE))
    if normal is not None and without is not None and math.isfinite(normal[1]):
        of_ranks = _sum(known, "more work", "slow line", "slow rank", "lone")
        seconds = max(0.0, normal[0] - without[0] - queued - of_ranks)
        error = math.hypot(normal[1], without[1])
        text = f"a step takes {ms(without[0])} ms without the exchange of gradients, {ms(normal[0])} with it"
        if _sum(known, "collective"):
            text += ", each without the collectives of your own code"
    details = exchange_parts(evidence, seconds)
    overlap = _overlap(evidence, seconds, error)
    if overlap is not None and overlap.is_clear:
        yield overlap
        seconds -= overlap.seconds
    yield Cause("exchange", seconds, error, text, details=details)


def exchange_parts(evidence: Evidence, seconds: float) -> Mapping[str, float]:
    """Return the seconds that latency and bandwidth take of an exchange that is not hidden."""
    if evidence.line is None or not evidence.exchanged_bytes:
        return {}
    pieces = max(1, math.ceil(evidence.exchanged_bytes / (evidence.bucket_mb * 2**20)))
    latency, bandwidth = evidence.line.parts(evidence.exchanged_bytes, pieces)
    part = seconds / (latency + bandwidth)
    return {"latency_s": latency * part, "bandwidth_s": bandwidth * part, "pieces": pieces}


def _overlap(evidence: Evidence, seconds: float, error: float) -> Cause | None:
    """Return what the backward pass could hide of an exchange that takes `seconds` beside it, and does not.

    All buckets but the last one can be exchanged while the backward pass runs:

        backward     |====|====|====|
        exchange          |--1--|--2--|--3--|         what is left over: the last bucket, or what is longer than it
    """
    backward = evidence.figure(NO_EXCHANGE, "parts", "backward")
    if backward is None or evidence.line is None or not evidence.exchanged_bytes:
        return None
    # With --accumulate, the last of several passes exchanges.
    backward_s, num_bytes = backward[0] / evidence.facts.get("passes", 1), evidence.exchanged_bytes

    def left_s(pieces: int) -> float:
        whole = sum(evidence.line.parts(num_bytes, pieces)) if evidence.line else 0.0
        return whole / pieces if pieces == 1 else max(whole / pieces, whole - backward_s * (pieces - 1) / pieces)

    counts = {size: max(1, math.ceil(num_bytes / (size * 2**20))) for size in (evidence.bucket_mb, *BUCKETS_MB)}
    left = {size: left_s(count) for size, count in counts.items()}
    # Small buckets have costs of their own: the largest that is nearly as good as the best.
    best = max(size for size in left if left[size] <= min(left.values()) + MIN_SHARE * evidence.step_s)
    pieces = counts[evidence.bucket_mb]
    whole = sum(evidence.line.parts(num_bytes, pieces))
    saved = min(seconds, whole) - left[best]
    if not any(profile.uses_gpu for profile in evidence.profiles):
        # An exchange that keeps the cores busy cannot overlap with a backward pass that does, too.
        idle_cores = max(0.0, evidence.cores - evidence.run_cores)
        saved = min(saved, idle_cores / evidence.ranks * evidence.step_s)
    if saved < MIN_SHARE * evidence.step_s:
        return None
    text = (
        f"the backward pass takes {ms(backward_s)} ms and the exchange by itself {ms(whole)} ms, in "
        f"{plural(pieces, 'bucket')}; together they take {ms(saved)} ms longer than they need to"
    )
    by_size = left[evidence.bucket_mb] - left[best] > saved / 2
    details = {"pieces": pieces, "best_mb": best, "best_pieces": counts[best], "by_size": by_size}
    return Cause("overlap", saved, math.hypot(error, backward[1]), text, details=details)


def _of_contention(evidence: Evidence, known: Sequence[Cause]) -> Iterator[Cause]:
    alone, apart = evidence.figure(ALONE, "compute_s"), evidence.figure(NO_EXCHANGE, "compute_s")
    if alone and apart:
        text = f"computing takes {ms(apart[0])} ms beside the other ranks, {ms(alone[0])} alone"
        seconds = apart[0] - alone[0] - _sum(known, "contention", "pinned", "programs")
        yield Cause("contention", max(0.0, seconds), math.hypot(alone[1], apart[1]), text)


def _of_overhead(evidence: Evidence, known: Sequence[Cause]) -> Iterator[Cause]:
    alone, twice = evidence.figure(ALONE, "compute_s"), evidence.figure(TWICE, "compute_s")
    if alone and twice and twice[0] > alone[0]:  # else the noise is larger than the difference
        fixed = _sum(known, "callback", "update", "script", "computing", "model", "hiccups")
        text = f"one rank computes {ms(alone[0])} ms a step, and {ms(twice[0])} for twice the batch"
        seconds = min(2 * alone[0] - twice[0], alone[0]) - fixed
        details = {"more_s": twice[0] - alone[0]}
        yield Cause("overhead", seconds, math.hypot(2 * alone[1], twice[1]), text, details=details)
