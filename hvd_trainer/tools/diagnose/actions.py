"""The causes of lost time in words, and the advice about each: what to change, and the gain to expect."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from hvd_trainer.tools.diagnose.causes import leading
from hvd_trainer.tools.diagnose.evidence import NO_EXCHANGE, NORMAL, SIGMAS, Cause, Evidence
from hvd_trainer.tools.diagnose.own_code import MANY_CALLS
from hvd_trainer.utils.text import plural

MAX_ACTIONS = 3
"""Actions in a report."""
MIN_GAIN = 1.03
"""Relative speed below which nothing is advised."""
MAX_WORKERS = 8
MAX_SAVED = 0.95
"""Fraction of a step that a change may save."""
DEFAULT_FUSION_MB = 64
ADVISED_ACCUMULATE = 4
"""Passes per exchange that are advised where there shall be fewer exchanges."""
MIN_FREE_CORES = 0.5
"""Free cores per rank from which a further process is advised."""
MAX_MEMORY_SHARE = 0.45
"""Fraction of the memory that a job may use for its batch to be doubled."""


@dataclass(frozen=True)
class Action:
    """A change to try."""

    cause: Cause
    text: str
    """what to type or do"""
    _: KW_ONLY
    speed: float = 1.0
    """the samples per second to expect, as a multiple of now; 1: nobody knows"""
    low: float = 1.0
    high: float = 1.0
    """its 95 % interval"""
    words: tuple[str, ...] = ()
    """an option of the job and its value; of a script, of `run`"""
    now: str = ""
    """the value that the option has"""
    changes_numbers: bool = False
    """whether the training computes something else with it, such as steps of another batch"""

    @property
    def vary(self) -> str:
        """What `compare --vary` takes to prove it; empty without an option."""
        return f"{self.words[0][2:]}={self.now},{self.words[1]}" if self.words else ""


def find_actions(causes: Sequence[Cause], evidence: Evidence) -> list[Action]:
    """Return the best few actions, that with the largest gain first; none whose gain may be noise.

    There is one about the largest cause, and about the largest of the job's own, if any is known. What changes no
    number of the training comes before what does.
    """
    useful: list[Action] = []
    first: list[Action] = []
    for cause in causes:
        made = list(_advice(cause, evidence))
        good = [action for action in made if action.speed == 1 or (action.speed >= MIN_GAIN and action.low > 1)]
        if cause in leading(causes):  # told, also where nobody knows the gain
            good = good or [replace(action, speed=1.0, low=1.0, high=1.0) for action in made[:1]]
            first += sorted(good, key=lambda action: -action.speed)[:1]
        useful += good
    others = (one for one in useful if one not in first)
    ranked = sorted(others, key=lambda one: (one.changes_numbers, -round(one.speed, 6)))
    kept = [*first, *ranked][:MAX_ACTIONS]

    def place(one: Action) -> tuple[bool, bool, float]:
        # Where nobody knows the gain, that of the leading causes comes first.
        return one.changes_numbers, one.speed > 1 or one not in first, -round(one.speed, 6)

    return sorted(kept, key=place)


def _advice(cause: Cause, evidence: Evidence) -> Iterator[Action]:
    if cause.kind in MAKERS:
        yield from MAKERS[cause.kind](cause, evidence)
    elif CAUSES[cause.kind].advice:
        own = {**cause.details, "where": _at(cause), "rank": cause.rank}
        text = cause.details.get("advice") or CAUSES[cause.kind].advice.format(**own)
        yield _action(cause, evidence, text, cause.details.get("saved_s"))


def _action(cause: Cause, evidence: Evidence, text: str, saved: float | None = None, **further: Any) -> Action:
    """Return an action that saves `saved` of the cause's seconds; all of them if that is None."""
    step, all_s = evidence.step_s, cause.seconds if saved is None else saved
    error = cause.error * all_s / max(cause.seconds, 1e-9)
    limit = min(_max_saved(cause, evidence), MAX_SAVED * step)

    def speed(seconds: float) -> float:
        return step / max(step - min(max(seconds, 0.0), limit), 1e-9)

    low, high = speed(all_s - SIGMAS * error), speed(all_s + SIGMAS * error)
    return Action(cause, text, speed=speed(all_s), low=low, high=high, **further)


def _max_saved(cause: Cause, evidence: Evidence) -> float:
    """Return the seconds of a step that a run without the exchange has saved, for what is a part of it."""
    normal, without = evidence.figure(NORMAL), evidence.figure(NO_EXCHANGE)
    if cause.kind not in ("exchange", "overlap", "collective") or normal is None or without is None:
        return math.inf
    if cause.kind == "collective":
        before, after = (evidence.figure(label, "collective_s") for label in (NORMAL, NO_EXCHANGE))
        if before is None or after is None or after[0] > 0.5 * before[0]:  # that run had them, too
            return math.inf
    return max(0.0, normal[0] - without[0])


def _at(cause: Cause) -> str:
    return str(cause.line or cause.details.get("where") or "the line")


def _about_data(cause: Cause, evidence: Evidence) -> Iterator[Action]:
    facts, where, waits = evidence.facts, _at(cause), cause.kind == "data waits"
    workers = facts.get("workers")
    free = evidence.free_cores / evidence.ranks
    if waits and facts.get("in_memory"):
        text = (
            "the data is in memory, so that its time goes into taking batches from it and into its transform, if "
            "it has one: make that cheaper, or do once what it does again for each batch"
        )
        yield _action(cause, evidence, text)
        return
    if not waits and (free < MIN_FREE_CORES or facts.get("in_memory")):
        text = (
            f"make {where} cheaper, or store its results: it computes, and none of "
            f"{plural(evidence.cores, 'core')} is free for loader processes"
        )
        yield _action(cause, evidence, text)
        return
    if waits:
        now = max(1, workers or evidence.profiles[0].processes)
        # One for as long as a sample takes longer to fetch than to train on. Rounded: versions of Python differ
        # in the last bits of a sum.
        ratio = round(cause.seconds / max(evidence.step_s - cause.seconds, 1e-9), 6)
        count = min(now * (1 + math.ceil(ratio)), max(MAX_WORKERS, 2 * now))
        saved = cause.seconds * (1 - now / count)
        who = "it waits" if facts.get("has_own_loader") else "that many processes per rank wait"
        why = f"{who} for data while the rank trains, at {where}"
    else:
        count = (workers or 0) + max(1, math.floor(free + 0.3))
        saved = min(cause.seconds * (1 - 1 / (1 + free)), evidence.step_s * MAX_SAVED)
        why = f"{plural(round(free * evidence.ranks), 'core')} are free to compute data in, at {where}"
    if facts.get("has_own_loader"):
        yield _action(cause, evidence, f"more threads or processes in the data's own loader: {why}", saved)
    elif not evidence.is_trainer_job:
        yield _action(cause, evidence, f"num_workers={count} in the DataLoader: {why}", saved)
    else:
        text = f"--workers {count}: {why}{'' if workers is None else f' (now {workers})'}"
        yield _action(cause, evidence, text, saved, words=("--workers", str(count)), now=str(workers or 0))


def _about_overlap(cause: Cause, evidence: Evidence) -> Iterator[Action]:
    details = cause.details
    if not details["by_size"]:
        text = (
            "the order of gradients: the exchange waits for one that backward finishes late. Register modules in "
            "the order in which forward uses them, and leave out what backward does not reach, so that "
            "find_unused_parameters is not needed"
        )
        yield _action(cause, evidence, text)
        return
    size = details["best_mb"]
    why = (
        f"{plural(details['best_pieces'], 'bucket')} of gradients, all but the last exchanged while the backward "
        f"pass runs (now {details['pieces']})"
    )
    option, now = "--bucket-mb", evidence.bucket_mb
    if not evidence.is_trainer_job and evidence.facts.get("uses_hvd"):
        option, now = "--fusion-threshold-mb", DEFAULT_FUSION_MB
    of = "" if evidence.is_trainer_job else " of `hvd-trainer run`"
    if not evidence.is_trainer_job and option == "--bucket-mb":
        of += f", or bucket_cap_mb={size:g} of DistributedDataParallel"
    words = (option, f"{size:g}")
    yield _action(cause, evidence, f"{option} {size:g}{of}: {why}", words=words, now=f"{now:g}")


def _about_exchange(cause: Cause, evidence: Evidence) -> Iterator[Action]:
    facts, fewer_s = evidence.facts, cause.seconds * (1 - 1 / ADVISED_ACCUMULATE)
    latency, bandwidth = (cause.details.get(name, 0.0) for name in ("latency_s", "bandwidth_s"))
    if not evidence.is_trainer_job:
        text = (
            "exchange less often (several backward passes per optimizer step: no_sync, or "
            "backward_passes_per_step), or compress the gradients"
        )
        yield _action(cause, evidence, text, fewer_s, changes_numbers=True)
        return
    if facts.get("passes", 1) == 1:
        text = (
            f"--accumulate {ADVISED_ACCUMULATE}: exchange once in {ADVISED_ACCUMULATE} passes; the global batch "
            f"is then {ADVISED_ACCUMULATE} times as large, so look at the learning rate"
        )
        words = ("--accumulate", str(ADVISED_ACCUMULATE))
        yield _action(cause, evidence, text, fewer_s, words=words, now="1", changes_numbers=True)
    if facts.get("compression", "none") == "none" and bandwidth > latency:
        text = "--compression fp16: half the bytes on the wire; the last bits of gradients are lost"
        words = ("--compression", "fp16")
        yield _action(cause, evidence, text, bandwidth / 2, words=words, now="none", changes_numbers=True)


def _about_contention(cause: Cause, evidence: Evidence) -> Iterator[Action]:
    cores, ranks = evidence.cores, evidence.ranks
    threads, workers = evidence.threads, max(profile.processes for profile in evidence.profiles)
    waiting = f"on {plural(cores, 'core')}, and wait for each other's turn"
    if threads > 1 and threads * ranks > cores:
        text = (
            f"OMP_NUM_THREADS=1, or --threads 1: {ranks} ranks with {threads} threads each are {threads * ranks} "
            f"{waiting}"
        )
        yield _action(cause, evidence, text, words=("--threads", "1"), now=str(threads))
        return
    text = (
        "OMP_NUM_THREADS=1, or --threads 1, if the ranks have more threads than that; else they share the "
        "cores, caches and memory of this machine, where fewer ranks or a larger batch may help"
    )
    if ranks > cores:
        text = f"-np {cores}: {ranks} ranks share {plural(cores, 'core')}, and none of them is faster for it"
    elif workers and ranks * (1 + workers) > cores:
        option = "--workers" if evidence.is_trainer_job else "num_workers"
        text = (
            f"fewer loader processes ({option}): {ranks} ranks with {workers} each are {ranks * (1 + workers)} "
            f"processes {waiting}"
        )
    yield Action(cause, text)


def _about_collective(cause: Cause, evidence: Evidence) -> Iterator[Action]:
    calls, size, where = cause.details["calls"], cause.details["bytes"], _at(cause)
    if "barrier" in cause.details["function"]:
        text = "leave this barrier out, unless files or devices need it: every exchange waits for all ranks"
        yield Action(cause, f"{where}: {text}")
        return
    text = (
        f"{where}: do this every few steps only: add up on each rank, and exchange the sum, several values as one "
        f"tensor"
    )
    if calls > MANY_CALLS:
        text = (
            f"{where}: send them as one tensor, not {calls:.0f} a step (torch.cat, or DistributedDataParallel if "
            f"they are gradients)"
        )
    if evidence.line is None or not calls:
        yield Action(cause, text)
        return
    # By itself, on ranks that are there at the same time, it takes no longer than this.
    saved = min(cause.seconds, sum(evidence.line.parts(calls * size, calls)))
    together = sum(evidence.line.parts(calls * size, 1)) if calls > 1 else 0.0
    yield _action(cause, evidence, text, max(0.0, saved - together))


def _about_overhead(cause: Cause, evidence: Evidence) -> Iterator[Action]:
    batch, more_s = evidence.facts["batch_size"], cause.details["more_s"]
    if evidence.facts.get("memory_share", 0.0) > MAX_MEMORY_SHARE:
        return
    # Twice the samples in a step that is `more_s` longer take as long as two steps that are `saved` shorter each.
    saved = min((evidence.step_s - more_s) / 2, cause.seconds)
    text = (
        f"--batch-size {2 * batch}: twice the samples for a step that takes {more_s / evidence.step_s:.0%} "
        f"longer; the global batch doubles, so look at the learning rate"
    )
    words = ("--batch-size", str(2 * batch))
    yield _action(cause, evidence, text, saved, words=words, now=str(batch), changes_numbers=True)


MAKERS: dict[str, Callable[[Cause, Evidence], Iterator[Action]]] = {
    "data waits": _about_data,
    "data computes": _about_data,
    "overlap": _about_overlap,
    "exchange": _about_exchange,
    "contention": _about_contention,
    "collective": _about_collective,
    "overhead": _about_overhead,
}
"""Functions that yield the advice about causes that have none in causes.yaml."""


class Described(msgspec.Struct, forbid_unknown_fields=True):
    """A cause in words, and what to do about it."""

    name: str
    advice: str = ""
    """it saves the detail `saved_s`, or all"""
    part: str = ""
    """the part of a step that it is in, by its name in `TEXTS`; empty where that is the cause's own"""


CAUSES = msgspec.yaml.decode(Path(__file__).with_name("causes.yaml").read_bytes(), type=dict[str, Described])
"""All causes of lost time, by their kinds."""
