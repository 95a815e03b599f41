"""Advice about a step's lost time: the option to set, and the gain to expect. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hvd_trainer.tools.diagnose.causes import ALONE, NORMAL, ONE_THREAD, TWICE, Figures, Shares
from hvd_trainer.utils.text import plural

Runs = Mapping[str, Figures]
Facts = Mapping[str, Any]
MAX_ACTIONS = 3
"""Actions in a report."""
ADVISED_ACCUMULATE = 4
"""Passes per exchange that are advised where there shall be fewer exchanges."""


@dataclass(frozen=True)
class Action:
    """A change to try."""

    cause: str
    text: str
    """what to type or do"""
    speed: float
    """the samples per second to expect, as a multiple of now; 1: nobody knows"""
    words: tuple[str, ...] = ()
    """further options of the job"""
    threads: int | None = None
    """of each rank"""
    batch_factor: int = 1
    """samples of a step, as a multiple of now"""

    @property
    def can_be_tried(self) -> bool:
        return bool(self.words) or self.threads is not None


def find_actions(found: Shares, runs: Runs, facts: Facts, ranks: int) -> list[Action]:
    """Return the best few actions: first those against the largest loss, then those with the largest gains.

    Args:
        found: the shares.
        runs: figures by the runs' names.
        facts: run.json of the normal run, with `cores`: those of a node.
        ranks: of the job.
    """
    makers = {
        "data": _about_data,
        "exchange": _about_exchange,
        "straggler": _about_straggler,
        "contention": _about_contention,
        "overhead": _about_overhead,
    }
    made = [action for cause in found.ranked for action in makers[cause](found, runs, facts, ranks)]
    return sorted(made, key=lambda action: (action.cause != found.ranked[0], -action.speed))[:MAX_ACTIONS]


def _without(found: Shares, seconds: float) -> float:
    """Return the relative speed if a step were shorter by `seconds`."""
    return found.step_s / max(found.step_s - seconds, 1e-9)


def _about_data(found: Shares, runs: Runs, facts: Facts, ranks: int) -> list[Action]:
    if facts["in_memory"]:
        text = (
            "the data is in memory, so that its time goes into taking batches from it and into its transform, if "
            "it has one: make that cheaper, or do once what it does again for each batch"
        )
        return [Action("data", text, _without(found, found.seconds["data"]))]
    # A worker for as long as a sample takes longer to fetch than to train on.
    ratio = found.seconds["data"] / max(found.step_s - found.seconds["data"], 1e-9)
    workers = max(1, facts["workers"]) * (1 + min(7, math.ceil(ratio)))
    kept = found.seconds["data"] * max(1, facts["workers"]) / workers
    text = f"--workers {workers}: that many processes per rank fetch data while it trains (now {facts['workers']})"
    speed = _without(found, found.seconds["data"] - kept)
    return [Action("data", text, speed, ("--workers", str(workers)))]


def _about_exchange(found: Shares, runs: Runs, facts: Facts, ranks: int) -> list[Action]:
    made = []
    if facts["passes"] == 1:
        saved = found.seconds["exchange"] * (1 - 1 / ADVISED_ACCUMULATE)
        text = (
            f"--accumulate {ADVISED_ACCUMULATE}: exchange once in {ADVISED_ACCUMULATE} passes; the global batch "
            f"is then {ADVISED_ACCUMULATE} times as large, so look at the learning rate"
        )
        words = ("--accumulate", str(ADVISED_ACCUMULATE))
        made.append(Action("exchange", text, _without(found, saved), words, batch_factor=ADVISED_ACCUMULATE))
    if facts["compression"] == "none" and found.bandwidth_s > found.latency_s:
        text = "--compression fp16: half the bytes on the wire; the last bits of gradients are lost"
        speed = _without(found, found.bandwidth_s / 2)
        made.append(Action("exchange", text, speed, ("--compression", "fp16")))
    return made


def _about_straggler(found: Shares, runs: Runs, facts: Facts, ranks: int) -> list[Action]:
    each = runs[NORMAL]["computing_s"]
    text = (
        f"rank {found.slowest_rank} is the slowest: it computes {1000 * max(each):.1f} ms a step where the "
        f"quickest takes {1000 * min(each):.1f}. See what else runs there, and whether it has more to do"
    )
    return [Action("straggler", text, _without(found, found.seconds["straggler"]))]


def _about_contention(found: Shares, runs: Runs, facts: Facts, ranks: int) -> list[Action]:
    threads, cores = facts["threads"], facts["cores"]
    if threads > 1 and ONE_THREAD in runs and threads * ranks > cores:
        speed = found.step_s / runs[ONE_THREAD]["step_s"]
        text = (
            f"OMP_NUM_THREADS=1: {ranks} ranks with {threads} threads each are {threads * ranks} on "
            f"{plural(cores, 'core')}, and wait for each other's turn"
        )
        return [Action("contention", text, speed, threads=1)]
    if ranks > cores:
        text = f"-np {cores}: {ranks} ranks share {plural(cores, 'core')}, and none of them gets on faster by it"
        return [Action("contention", text, 1.0)]
    text = "the ranks share the caches and memory of a machine: fewer ranks or a larger --batch-size may help"
    return [Action("contention", text, 1.0)]


def _about_overhead(found: Shares, runs: Runs, facts: Facts, ranks: int) -> list[Action]:
    batch = facts["batch_size"]
    more_s = max(runs[TWICE]["step_s"] - runs[ALONE]["step_s"], 0.0)
    speed = 2 * found.step_s / (found.step_s + more_s)
    text = (
        f"--batch-size {2 * batch}: twice the samples for a step that takes {more_s / found.step_s:.0%} longer; "
        f"the global batch doubles, so look at the learning rate"
    )
    return [Action("overhead", text, speed, ("--batch-size", str(2 * batch)), batch_factor=2)]
