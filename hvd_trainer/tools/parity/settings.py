"""What two runs were set up for: by name, to be compared."""

from __future__ import annotations

from typing import Any

from hvd_trainer.config.checks import flag
from hvd_trainer.tools.compare.equal_work import ASPECTS
from hvd_trainer.tools.parity.traces import Trace

OF_RUN = {"backend", "log_dir"}
"""Options that any two runs have unlike."""
OF_SIZE = {"batch_size", "global_batch_size", "accumulate"}
"""Options that runs on different numbers of ranks have unlike."""


def run_settings(one: Trace, other: Trace) -> tuple[dict[str, Any], dict[str, Any]]:
    """What two runs must have been set up alike, by name: what they trained, what model, what options."""
    same_size = one.size == other.size
    aspects = {
        aspect.name: aspect.text
        for aspect in ASPECTS
        if same_size or aspect.across or aspect.name == "global_batch_size"
    }
    unlike = OF_RUN if same_size else OF_RUN | OF_SIZE
    its: list[dict[str, Any]] = []
    for trace in (one, other):
        facts = {text: trace.facts[name] for name, text in aspects.items() if name in trace.facts}
        shapes = {name: shape for rank in trace.ranks for name, shape in rank[min(rank)].line["shapes"].items()}
        options = {flag(name): value for name, value in trace.options.items() if name not in unlike}
        its.append({**facts, **shapes, **options})
    return its[0], its[1]


def settings(trace: Trace) -> dict[str, str]:
    """The optimizer's, by name: `weight_decay`, and `weight_decay of group 1`."""
    return {
        key if number == 0 else f"{key} of group {number}": value
        for number, group in enumerate(trace.start["settings"])
        for key, value in group.items()
    }
