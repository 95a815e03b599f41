"""Find the known causes that fit the differences between two runs: the table is causes.yaml, in the order in which
they act. Its functions here tell whether a cause fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import msgspec

from hvd_trainer.tools.parity.comparison import EXCHANGE, Pair
from hvd_trainer.tools.parity.tensors import NONE, Finding
from hvd_trainer.tools.parity.tolerance import TOLERANCE_BY_PRECISION, expected_tolerance
from hvd_trainer.tools.parity.traces import Moment, Trace

MAX_RATIO_ERROR = 1e-3
"""The relative difference between a ratio and the number that explains it."""
MAX_NORM_ERROR = 1e-4
"""The relative difference of gradient norms that were clipped to the same one."""
MAX_WEIGHT_CHANGE = 0.1
"""The relative difference up to which weights were equal before something changed them."""
ROUNDED_QUANTITIES = ("loss", "gradients", "gradient norm", "parameters", "optimizer", "buffers")
"""Quantities that rounding can change."""

Fit = Mapping[str, object] | None
"""What completes the text of a cause, besides run, name and values of the finding; None: it does not fit."""


class Cause(NamedTuple):
    """A possible cause, and what to do about it."""

    text: str
    advice: str


class Known(msgspec.Struct, forbid_unknown_fields=True):
    """A row of the table. Of the rows about one quantity the first that fits is a cause."""

    quantity: str
    """what must differ, `first` standing for whatever is the first finding"""
    when: str
    """the function here that tells whether it fits the first finding about that quantity, which is one among ranks
    if there is any"""
    text: str
    advice: str


@cache
def known_causes() -> list[Known]:
    """Return the table."""
    return msgspec.yaml.decode(Path(__file__).with_name("causes.yaml").read_bytes(), type=list[Known])


def find_causes(pair: Pair) -> list[Cause]:
    """Return the known causes of what differs, in the order in which they would act; empty if none fits."""
    causes: dict[str, Cause] = {}
    for known in known_causes():
        finding = pair.finding(known.quantity)
        if finding is None or known.quantity in causes:
            continue
        fit: Fit = globals()[known.when](pair, finding)
        if fit is not None:
            one, other = finding.values
            values = {"run": finding.run, "name": finding.name, "one": one, "other": other, **fit}
            causes[known.quantity] = Cause(known.text.format(**values), known.advice.format(**values))
    return list(causes.values())


def always(pair: Pair, finding: Finding) -> Fit:
    return {}


# Before the first step.


def two_paths(pair: Pair, finding: Finding) -> Fit:
    return {"first": pair.one.name, "second": pair.other.name} if finding.name == EXCHANGE else None


def step_before_training(pair: Pair, finding: Finding) -> Fit:
    state, weights = pair.finding("optimizer"), pair.finding("parameters")
    if not pair.at_start or any(apart.run or apart.name == EXCHANGE for apart in pair.findings):
        return None
    if state is not None and NONE in state.values:
        return {"who": pair.other.name if state.values[0] == NONE else pair.one.name}
    moved = weights is not None and weights.relative < MAX_WEIGHT_CHANGE
    return {"who": "one side"} if moved or state is not None else None


def weights_drawn_apart(pair: Pair, finding: Finding) -> Fit:
    """Return whether other random numbers have made other weights; a step moves them a little."""
    far = MAX_WEIGHT_CHANGE <= finding.relative < math.inf
    return {} if pair.at_start and far and not finding.run else None


def ranks_start_apart(pair: Pair, finding: Finding) -> Fit:
    run = next((apart.run for apart in pair.findings if apart.run), None)
    return {"run": run} if pair.at_start and run else None


# Samples.


def takes_same_samples(trace: Trace, step: Moment) -> bool:
    """Return whether all replicas take the same samples in a step."""
    taken, copies = trace.samples(step), trace.start["copies"]
    return copies > 1 and bool(taken) and all(count % copies == 0 for count in taken.values())


def same_samples_on_all_ranks(pair: Pair, finding: Finding) -> Fit:
    return _runs_in_which(takes_same_samples, pair, finding)


def same_order_in_each_epoch(pair: Pair, finding: Finding) -> Fit:
    return _runs_in_which(lambda trace, step: step in trace.repeats, pair, finding)


def _runs_in_which(is_so: Callable[[Trace, Moment], bool], pair: Pair, finding: Finding) -> Fit:
    names = [trace.name for trace in pair.runs if is_so(trace, finding.when)]
    return {"names": " and ".join(names)} if names else None


# Within a step.


def scaled(pair: Pair, finding: Finding) -> Fit:
    """Return by which number of the runs a figure is larger in one than in the other."""
    sides = (value if isinstance(value, tuple) else (value,) for value in finding.values)
    left, right = next(((a, b) for a, b in zip(*sides, strict=False) if a != b), (1.0, 1.0))
    large, small = pair.runs if abs(left) >= abs(right) else pair.runs[::-1]
    ratio = max(abs(left), abs(right)) / (min(abs(left), abs(right)) or math.inf)
    if finding.run:
        return None
    ranks, losses = max(pair.one.size, pair.other.size), large.lines(finding.when)[0]["losses"]
    passes = len(losses) if large.is_script else int(large.options["accumulate"])
    numbers = {"its number of ranks": ranks, "its number of passes": passes}
    if finding.quantity == "learning rate":
        numbers = {"its number of ranks": ranks, "the root of its number of ranks": ranks**0.5}
    factors = [name for name, number in numbers.items() if _is_near(ratio, number)]
    return {"large": large.name, "small": small.name, "factor": " or ".join(factors)} if factors else None


def _is_near(ratio: float, number: float) -> bool:
    """Return whether a ratio is this number, but for rounding; 1 explains nothing."""
    return number > 1 and abs(ratio / number - 1) < MAX_RATIO_ERROR


def other_forward(pair: Pair, finding: Finding) -> Fit:
    before = {"samples", "skipped", "learning rate"} & {apart.quantity for apart in pair.findings}
    weights, unequal = pair.finding("parameters"), pair.one.size != pair.other.size
    if before or (weights is not None and weights.run) or rounding(pair, finding) is not None:
        return None
    texts = {"dropout": "dropout ({}) after one side has drawn random numbers more than the other; "}
    if unequal:
        texts = {
            "dropout": "dropout ({}) draws other numbers on each rank; ",
            "batch_norm": "batch norm ({}) normalises the batch of each rank by itself; ",
        }
    return {
        "layers": "".join(
            text.format(names) for kind, text in texts.items() if (names := _first_few(pair.one, kind))
        )
    }


def _first_few(trace: Trace, kind: str) -> str:
    """Join the names of the first three layers of a kind; empty if the model has none."""
    names = trace.start[kind]
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def not_averaged(pair: Pair, finding: Finding) -> Fit:
    some = f"{finding.count} of {finding.total} gradients, such as that of {finding.name}"
    return {"what": "its gradients" if finding.count == finding.total else some} if finding.run else None


def clipped(pair: Pair, finding: Finding) -> Fit:
    """Return the run whose gradient norms end at one and the same number, if only one's do."""
    limits = {trace.name: limit for trace in pair.runs if (limit := _clipped_to(trace)) is not None}
    if len(limits) != 1:
        return None
    (who, norm), (whom,) = *limits.items(), {trace.name for trace in pair.runs} - {*limits}
    return {"who": who, "norm": f"{norm:.4g}", "whom": whom}


def _clipped_to(trace: Trace) -> float | None:
    """Return the largest gradient norm, if more than one step has it."""
    norms = [norm for step in trace.steps if (norm := trace.grad_norm(step)) is not None]
    largest = max(norms, default=0.0)
    near = [norm for norm in norms if norm >= largest * (1 - MAX_NORM_ERROR)]
    return largest if len(near) > 1 else None


def batch_norm_between_runs(pair: Pair, finding: Finding) -> Fit:
    return {} if finding is pair.findings[0] and not (finding.run or pair.at_start) else None


def rounding(pair: Pair, finding: Finding) -> Fit:
    """Return why sums round otherwise, if a difference is that small, or the step before had a smaller one."""
    among_ranks = any(apart.run for apart in pair.findings)
    if among_ranks or pair.at_start or pair.findings[0].quantity not in ROUNDED_QUANTITIES:
        return None
    expected = expected_tolerance(pair.one, pair.other)
    is_first = finding.when <= pair.one.steps[0]
    limit = max(TOLERANCE_BY_PRECISION[pair.one.precision][0], expected.limit(finding.quantity, first=is_first))
    has_grown = any(gap for step, gap in pair.gaps.items() if step < finding.when.step)
    why = "" if expected.exact else f" ({expected.why})"
    return {"why": why, "limit": max(1e-5, expected.later)} if finding.relative <= limit or has_grown else None
