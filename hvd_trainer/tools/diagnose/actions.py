"""Advice about lost time: what to change, and the gain to expect. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hvd_trainer.tools.diagnose.causes import ONE_THREAD, SIGMAS, Cause, Evidence
from hvd_trainer.utils.text import plural

MAX_ACTIONS = 3
"""Actions in a report."""
MIN_GAIN = 1.03
"""Relative speed below which nothing is advised."""
MAX_WORKERS = 8
MAX_SAVED = 0.95
"""Fraction of a step that a change may save."""
ADVISED_ACCUMULATE = 4
"""Passes per exchange that are advised where there shall be fewer exchanges."""
MIN_FREE_CORES = 0.5
"""Free cores per rank from which a further process is advised."""
MAX_MEMORY_SHARE = 0.45
"""Fraction of the memory that a job may use for its batch to be doubled."""


@dataclass(frozen=True, kw_only=True)
class Action:
    """A change to try."""

    cause: str
    text: str
    """what to type or do"""
    speed: float = 1.0
    """the samples per second to expect, as a multiple of now; 1: nobody knows"""
    low: float = 1.0
    high: float = 1.0
    """its 95 % interval"""
    words: tuple[str, ...] = ()
    """further options of the job"""
    threads: int | None = None
    """of each rank"""
    batch_factor: int = 1
    """samples of a step, as a multiple of now"""

    @property
    def can_be_tried(self) -> bool:
        return bool(self.words) or self.threads is not None


def find_actions(causes: Sequence[Cause], evidence: Evidence) -> list[Action]:
    """Return the best few actions, that with the largest gain first; none whose gain may be noise.

    Args:
        causes: those that `find_causes` returns.
        evidence: by which they were found.
    """
    made = [action for cause in causes for action in ACTIONS[cause.kind](cause, evidence)]
    useful = [action for action in made if action.speed == 1 or (action.speed >= MIN_GAIN and action.low > 1)]
    return sorted(useful, key=lambda action: -action.speed)[:MAX_ACTIONS]


def _action(cause: Cause, evidence: Evidence, text: str, saved: float | None = None, **further: object) -> Action:
    """Return an action that saves `saved` of the cause's seconds; all of them if that is None."""
    step, all_s = evidence.step_s, cause.seconds if saved is None else saved
    error = cause.error * all_s / max(cause.seconds, 1e-9)

    def speed(seconds: float) -> float:
        return step / max(step - min(max(seconds, 0.0), MAX_SAVED * step), 1e-9)

    bounds = {"low": speed(all_s - SIGMAS * error), "high": speed(all_s + SIGMAS * error)}
    return Action(cause=cause.kind, text=text, speed=speed(all_s), **bounds, **further)  # type: ignore[arg-type]


def _at(cause: Cause) -> str:
    return str(cause.where or cause.details.get("library") or "the line")


def _workers(cause: Cause, evidence: Evidence, count: int, saved: float, why: str) -> Action:
    now = evidence.facts.get("workers")
    if now is None and not evidence.is_trainer_job:
        return _action(cause, evidence, f"num_workers={count} in the DataLoader: {why}", saved)
    text = f"--workers {count}: {why}{'' if now is None else f' (now {now})'}"
    return _action(cause, evidence, text, saved, words=("--workers", str(count)))


def _about_waiting_data(cause: Cause, evidence: Evidence) -> list[Action]:
    if evidence.facts.get("in_memory"):
        text = (
            "the data is in memory, so that its time goes into taking batches from it and into its transform, if "
            "it has one: make that cheaper, or do once what it does again for each batch"
        )
        return [_action(cause, evidence, text)]
    now = max(1, evidence.facts.get("workers") or 0)
    # A worker for as long as a sample takes longer to fetch than to train on.
    ratio = cause.seconds / max(evidence.step_s - cause.seconds, 1e-9)
    count = now * (1 + min(MAX_WORKERS - 1, math.ceil(ratio)))
    why = f"that many processes per rank wait for data while it trains, at {_at(cause)}"
    return [_workers(cause, evidence, count, cause.seconds * (1 - now / count), why)]


def _about_computing_data(cause: Cause, evidence: Evidence) -> list[Action]:
    free = evidence.free_cores / evidence.ranks
    now = evidence.facts.get("workers") or 0
    if free >= MIN_FREE_CORES and not evidence.facts.get("in_memory"):
        count = now + max(1, math.floor(free + 0.3))
        saved = min(cause.seconds * (1 - 1 / (1 + free)), evidence.step_s * MAX_SAVED)
        why = f"{plural(round(free * evidence.ranks), 'core')} are free to compute data in, at {_at(cause)}"
        return [_workers(cause, evidence, count, saved, why)]
    text = (
        f"make {_at(cause)} cheaper, or store its results: it computes, and none of "
        f"{plural(evidence.cores, 'core')} is free for loader processes"
    )
    return [_action(cause, evidence, text)]


def _about_line(todo: str) -> Callable[[Cause, Evidence], list[Action]]:
    def make(cause: Cause, evidence: Evidence) -> list[Action]:
        return [_action(cause, evidence, f"{_at(cause)}: {todo}")]

    return make


def _about_update(cause: Cause, evidence: Evidence) -> list[Action]:
    todo = "update all parameters at once (foreach=True or fused=True), not one by one in Python"
    return [_action(cause, evidence, f"{_at(cause)}: {todo}", None if cause.where else cause.seconds / 2)]


def _about_gil(cause: Cause, evidence: Evidence) -> list[Action]:
    text = (
        f"{_at(cause)}: move the thread {cause.details['thread']!r} of rank {cause.rank} to a process of its own; "
        f"while it has the GIL, no other thread runs Python"
    )
    return [_action(cause, evidence, text)]


def _about_programs(cause: Cause, evidence: Evidence) -> list[Action]:
    named = f": {cause.details['programs']}" if cause.details.get("programs") else ""
    return [_action(cause, evidence, f"end the other programs on these cores, or move them to others{named}")]


def _about_throttling(cause: Cause, evidence: Evidence) -> list[Action]:
    return [
        _action(cause, evidence, "raise the CPU limit of the container or the batch job, or start fewer threads")
    ]


def _about_swap(cause: Cause, evidence: Evidence) -> list[Action]:
    text = "the machine swaps: use less memory (a smaller --batch-size, fewer --workers), or end other programs"
    return [_action(cause, evidence, text)]


def _about_more_work(cause: Cause, evidence: Evidence) -> list[Action]:
    text = (
        f"give all ranks the same: rank {cause.rank} has {cause.details['ratio']:.3g} times the elements per "
        f"batch; sort or group samples by their length"
    )
    return [_action(cause, evidence, text, cause.seconds / evidence.ranks * (evidence.ranks - 1))]


def _about_slow_line(cause: Cause, evidence: Evidence) -> list[Action]:
    return [
        _action(
            cause, evidence, f"{_at(cause)}: rank {cause.rank} spends its time there, and all others wait for it"
        )
    ]


def _about_slow_rank(cause: Cause, evidence: Evidence) -> list[Action]:
    look = f"look at rank {cause.rank}'s machine"
    limits = "clock rate, temperature, limits, programs beside it"
    if "line" in cause.details:
        text = f"{look} ({limits}), or at what it has to do more than the others at {cause.details['line']}"
    else:
        text = f"{look}: it has the same work as the others and is slower in all of it ({limits})"
    return [_action(cause, evidence, text)]


def _about_hiccups(cause: Cause, evidence: Evidence) -> list[Action]:
    period = cause.details["period"]
    often = f"every {period:.0f} steps" if period else "now and then"
    what = _at(cause) if cause.where else f"its {cause.details['role']}"
    size = f"{1000 * cause.details['size_s']:.0f} ms {often}"
    text = f"{what}: it takes {size}; do it less often, or in a thread or process"
    return [_action(cause, evidence, text)]


def _about_exchange(cause: Cause, evidence: Evidence) -> list[Action]:
    facts, made = evidence.facts, []
    latency, bandwidth = (cause.details.get(name, 0.0) for name in ("latency_s", "bandwidth_s"))
    if "passes" not in facts and not evidence.is_trainer_job:
        text = (
            "exchange less often (several backward passes per optimizer step: no_sync, or "
            "backward_passes_per_step), or compress the gradients"
        )
        return [_action(cause, evidence, text, cause.seconds * (1 - 1 / ADVISED_ACCUMULATE))]
    if facts.get("passes", 1) == 1:
        saved = cause.seconds * (1 - 1 / ADVISED_ACCUMULATE)
        text = (
            f"--accumulate {ADVISED_ACCUMULATE}: exchange once in {ADVISED_ACCUMULATE} passes; the global batch "
            f"is then {ADVISED_ACCUMULATE} times as large, so look at the learning rate"
        )
        words = ("--accumulate", str(ADVISED_ACCUMULATE))
        made.append(_action(cause, evidence, text, saved, words=words, batch_factor=ADVISED_ACCUMULATE))
    if facts.get("compression", "none") == "none" and bandwidth > latency:
        text = "--compression fp16: half the bytes on the wire; the last bits of gradients are lost"
        made.append(_action(cause, evidence, text, bandwidth / 2, words=("--compression", "fp16")))
    return made


def _about_contention(cause: Cause, evidence: Evidence) -> list[Action]:
    threads, cores, ranks = evidence.facts.get("threads", 1), evidence.cores, evidence.ranks
    one = evidence.figure(ONE_THREAD)
    if threads > 1 and threads * ranks > cores:
        text = (
            f"OMP_NUM_THREADS=1: {ranks} ranks with {threads} threads each are {threads * ranks} on "
            f"{plural(cores, 'core')}, and wait for each other's turn"
        )
        saved = cause.seconds if one is None else evidence.step_s - one[0]
        return [_action(cause, evidence, text, saved, threads=1)]
    if ranks > cores:
        text = f"-np {cores}: {ranks} ranks share {plural(cores, 'core')}, and none of them gets on faster by it"
        return [Action(cause=cause.kind, text=text)]
    text = "the ranks share the caches and memory of a machine: fewer ranks or a larger --batch-size may help"
    return [Action(cause=cause.kind, text=text)]


def _about_overhead(cause: Cause, evidence: Evidence) -> list[Action]:
    batch = evidence.facts["batch_size"]
    if evidence.facts.get("memory_share", 0.0) > MAX_MEMORY_SHARE:
        return []
    more_s = cause.details["more_s"]
    # Twice the samples in a step that is `more_s` longer take as long as two steps that are `saved` shorter each.
    saved = min((evidence.step_s - more_s) / 2, cause.seconds)
    text = (
        f"--batch-size {2 * batch}: twice the samples for a step that takes {more_s / evidence.step_s:.0%} "
        f"longer; the global batch doubles, so look at the learning rate"
    )
    return [_action(cause, evidence, text, saved, words=("--batch-size", str(2 * batch)), batch_factor=2)]


ACTIONS: dict[str, Callable[[Cause, Evidence], list[Action]]] = {
    "data waits": _about_waiting_data,
    "data computes": _about_computing_data,
    "model": _about_line("the model waits there in each forward pass; take it out of the step"),
    "loss": _about_line("compute the loss of a batch by operations on whole tensors"),
    "backward": _about_line("it runs in each backward pass; make it cheaper"),
    "update": _about_update,
    "metric": _about_line("compute this metric less often, or by operations on whole tensors"),
    "callback": _about_line("do this every few steps only, or in a thread of its own"),
    "script": _about_line("do this every few steps only, or in a thread of its own"),
    "gil": _about_gil,
    "programs": _about_programs,
    "throttled": _about_throttling,
    "swap": _about_swap,
    "more work": _about_more_work,
    "slow line": _about_slow_line,
    "slow rank": _about_slow_rank,
    "hiccups": _about_hiccups,
    "exchange": _about_exchange,
    "contention": _about_contention,
    "overhead": _about_overhead,
}
"""Functions that make the advice about each cause."""
