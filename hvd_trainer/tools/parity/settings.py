"""Collect the settings of two runs by name, to be compared."""

from __future__ import annotations

from typing import Any

from hvd_trainer.config.checks import flag
from hvd_trainer.tools.compare.equal_work import ASPECTS
from hvd_trainer.tools.parity.traces import Trace

RUN_OPTIONS = {"backend", "log_dir"}
"""Options that differ between any two runs."""
SIZE_OPTIONS = {"batch_size", "global_batch_size", "accumulate"}
"""Options that differ between runs on different numbers of ranks."""


def run_settings(one: Trace, other: Trace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings that two runs must have alike, by name: of the data, the model and the options."""
    same_size = one.size == other.size
    aspects = {
        aspect.name: aspect.text
        for aspect in ASPECTS
        if same_size or aspect.across or aspect.name == "global_batch_size"
    }
    unlike = RUN_OPTIONS if same_size else RUN_OPTIONS | SIZE_OPTIONS
    its: list[dict[str, Any]] = []
    for trace in (one, other):
        facts = {text: trace.facts[name] for name, text in aspects.items() if name in trace.facts}
        shapes = {name: shape for rank in trace.ranks for name, shape in rank[min(rank)].line["shapes"].items()}
        options = {flag(name): value for name, value in trace.options.items() if name not in unlike}
        its.append({**facts, **shapes, **options})
    return its[0], its[1]


def optimizer_settings(trace: Trace) -> dict[str, str]:
    """Return the optimizer's settings by name: `weight_decay`, and `weight_decay of group 1`."""
    return {
        key if number == 0 else f"{key} of group {number}": value
        for number, group in enumerate(trace.start["settings"])
        for key, value in group.items()
    }
