"""Compare two runs: all that differs at the first moment at which anything does.

    start         set-up, parameters, the optimizer's settings and state, buffers
    each step     samples, learning rate, loss, gradients, their norm, parameters, the optimizer's state, buffers
    evaluation    buffers, figures

in this order, in which one quantity follows from another. A quantity that all ranks of a run should have in common
is compared among them before the runs are compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Any

from hvd_trainer.config.checks import flag
from hvd_trainer.tools.parity.tensors import (
    NONE,
    Finding,
    among_ranks,
    between_runs,
    largest_difference,
    relative_difference,
)
from hvd_trainer.tools.parity.tolerance import Tolerance, expected_tolerance
from hvd_trainer.tools.parity.traces import Moment, Trace
from hvd_trainer.tools.runner.equal_work import ASPECTS
from hvd_trainer.utils.text import plural

MAX_EVALUATION_ROUNDING = 1e-5
"""The allowed relative difference of test figures on unequal numbers of ranks: they evaluate in other batches, and
sum in another order, even where they train the same bits."""
RUN_OPTIONS = {"backend", "log_dir"}
"""Options that differ between any two runs."""
EXCHANGE = "what averages the gradients"
"""A setting of a script, where it is known of both runs."""
SIZE_OPTIONS = {"batch_size", "global_batch_size", "accumulate"}
"""Options that differ between runs on different numbers of ranks."""


@dataclass(frozen=True)
class Pair:
    """Two runs, and where they differ."""

    one: Trace
    other: Trace
    allowed: Tolerance
    findings: Sequence[Finding]
    """all that differs at the first moment at which anything does; empty if nothing does"""
    gaps: Mapping[int, float]
    """by step, the largest relative difference of a parameter; 0: the same bits"""

    @classmethod
    def compare(cls, one: Trace, other: Trace, asked: float | None = None) -> Pair:
        """Compare two runs.

        Args:
            asked: the tolerance that the user set; None: the expected one.
        """
        allowed = expected_tolerance(one, other, asked)
        both = sorted({*one.steps} & {*other.steps})
        gaps = {when.step: largest_difference(one, other, when) for when in both}
        return cls(one, other, allowed, _find_differences(one, other, allowed), gaps)

    @property
    def same(self) -> bool:
        return not self.findings

    @property
    def equal_bits(self) -> bool:
        return self.same and self.allowed.exact

    @property
    def name(self) -> str:
        return f"{self.one.name} and {self.other.name}"

    @property
    def step(self) -> int | None:
        """The step in which the runs part; 0 before the first; None if they do not."""
        return None if self.same else self.findings[0].when.step


def compare_all(traces: Sequence[Trace], asked: float | None = None) -> list[Pair]:
    """Compare each run with each other; of runs that have the same bits only the first is compared with the
    rest.
    """
    pairs: list[Pair] = []
    for one, other in combinations(traces, 2):
        if not any(pair.equal_bits and pair.other is one for pair in pairs):
            pairs.append(Pair.compare(one, other, asked))
    return pairs


def _find_differences(one: Trace, other: Trace, allowed: Tolerance) -> list[Finding]:
    both = sorted({*one.moments} & {*other.moments})
    first = next((when for when in both if when.name == "step"), both[-1])
    for when in both:
        found = list(_MomentComparison(one, other, when, allowed, first=when <= first).findings())
        if found:
            return found
    counts = len(one.steps), len(other.steps)
    return [Finding(both[-1], "steps", (one.name, other.name), counts)] if counts[0] != counts[1] else []


class _MomentComparison:
    """Two runs at one moment.

    Args:
        first: whether this is the first step or before it.
    """

    def __init__(self, one: Trace, other: Trace, when: Moment, allowed: Tolerance, *, first: bool) -> None:
        self._one, self._other, self._when = one, other, when
        self._allowed, self._limit = allowed, partial(allowed.limit, first=first)

    def findings(self) -> Iterator[Finding]:
        kinds = {"start": self._compare_start, "step": self._compare_step, "evaluation": self._compare_evaluation}
        return kinds[self._when.name]()

    def _compare_start(self) -> Iterator[Finding]:
        yield from self._compare_named("set-up", _run_settings(self._one, self._other))
        yield from self._compare_tensors("parameters")
        settings = _paired(_optimizer_settings(self._one), _optimizer_settings(self._other))
        yield from self._compare_named("settings", settings)
        yield from self._compare_tensors("optimizer")
        yield from self._compare_tensors("buffers", alike=True)

    def _compare_step(self) -> Iterator[Finding]:
        lines = [*self._one.lines(self._when), *self._other.lines(self._when)]
        yield from self._compare_samples()
        yield from self._compare_figure("skipped", lambda line: line["skipped"])
        if not any(line["skipped"] for line in lines):  # a skipped step does not use its rate
            yield from self._compare_figure("learning rate", lambda line: tuple(line["lr"]))
        yield from self._compare_losses()
        yield from self._compare_tensors("gradients")
        if all(line["grad_norm"] is not None for line in lines):
            limit = self._limit("gradient norm")
            yield from self._compare_figure("gradient norm", lambda line: line["grad_norm"], limit)
        yield from self._compare_tensors("parameters")
        yield from self._compare_tensors("optimizer")
        yield from self._compare_tensors("buffers", alike=self._one.options["reproducible"] is not None)

    def _compare_evaluation(self) -> Iterator[Finding]:
        yield from self._compare_tensors("buffers", alike=True)
        one, other = (trace.lines(self._when)[0]["figures"] for trace in (self._one, self._other))
        limit = self._limit("loss")
        if not self._allowed.exact:
            # One sample that changes its predicted class changes an accuracy by more than any rounding.
            one, other = ({k: v for k, v in its.items() if k == "test_loss"} for its in (one, other))
        elif self._one.size != self._other.size:
            limit = MAX_EVALUATION_ROUNDING
        yield from self._compare_named("evaluation", _paired(one, other), limit)

    def _finding(self, quantity: str, values: tuple[Any, Any], **more: Any) -> Finding:
        return Finding(self._when, quantity, (self._one.name, self._other.name), values, **more)

    def _compare_named(
        self, quantity: str, pairs: Mapping[str, tuple[Any, Any]], limit: float = 0.0
    ) -> Iterator[Finding]:
        """Yield a finding if values of the same name differ."""
        apart = {name: its for name, pair in pairs.items() if (its := _difference(*pair)) > limit}
        for name, relative in [*apart.items()][:1]:
            more = {"count": len(apart), "total": len(pairs)}
            yield self._finding(quantity, pairs[name], name=name, relative=relative, **more)

    def _compare_figure(
        self, quantity: str, value_of: Callable[[Mapping[str, Any]], Any], limit: float = 0.0
    ) -> Iterator[Finding]:
        """Yield findings about a figure that all ranks of a run have in common."""
        for trace in filter(_exchanges_gradients, (self._one, self._other)):
            first, *others = map(value_of, trace.lines(self._when))
            for rank, value in [(n, its) for n, its in enumerate(others, 1) if _difference(first, its) > 0][:1]:
                sides, values = ("rank 0", f"rank {rank}"), (first, value)
                yield Finding(self._when, quantity, sides, values, run=trace.name)
        one, other = (value_of(trace.lines(self._when)[0]) for trace in (self._one, self._other))
        yield from self._compare_named(quantity, {"": (one, other)}, limit)

    def _compare_samples(self) -> Iterator[Finding]:
        one, other, when = self._one, self._other, self._when
        left, right = one.samples(when), other.samples(when)
        if left != right:
            values = _describe_samples(left, right, other.name), _describe_samples(right, left, one.name)
            yield self._finding("samples", values)
        elif self._allowed.exact and one.size == other.size:
            pairs = zip(one.lines(when), other.lines(when), strict=True)
            ranks = [rank for rank, (a, b) in enumerate(pairs) if a["samples"] != b["samples"]]
            if ranks:
                yield self._finding("order", ("", ""), name=f"rank {ranks[0]}", count=len(ranks), total=one.size)

    def _compare_losses(self) -> Iterator[Finding]:
        one, other, limit = self._one, self._other, self._limit("loss")
        pairs = {"": (one.loss(self._when), other.loss(self._when))}
        if limit == 0 and one.size == other.size:
            pairs = {
                f"rank {rank}, pass {number}": pair
                for rank, lines in enumerate(zip(one.lines(self._when), other.lines(self._when), strict=True))
                for number, pair in enumerate(zip(*(line["losses"] for line in lines), strict=False), 1)
            }
        yield from self._compare_named("loss", pairs, limit)

    def _compare_tensors(self, kind: str, *, alike: bool | None = None) -> Iterator[Finding]:
        """Yield findings about the tensors of one kind.

        Args:
            alike: whether all ranks of a run must have equal tensors; None: if they exchange gradients.
        """
        limit = self._limit(kind)
        for trace in (self._one, self._other):
            if alike or (alike is None and _exchanges_gradients(trace)):
                yield from among_ranks(trace, self._when, kind, limit if self._allowed.everywhere else 0.0)
        if self._one.size != self._other.size and kind == "buffers" and self._when.name != "start":
            return  # each rank has statistics of its own samples
        yield from between_runs(self._one, self._other, self._when, kind, limit)


def _exchanges_gradients(trace: Trace) -> bool:
    return "exchange" not in trace.options["leave_out"]


def _difference(one: Any, other: Any) -> float:
    """Return 0 for equal values, the relative difference of two floats, and infinity for anything else that
    differs.
    """
    if isinstance(one, float) and isinstance(other, float):
        return relative_difference(one, other)
    return 0.0 if one == other else float("inf")


def _describe_samples(its: Counter[str], others: Counter[str], name: str) -> str:
    """Describe samples: `64 samples (32 different ones), 16 of which ddp does not take`."""
    total, missing = sum(its.values()), sum((its - others).values())
    text = plural(total, "sample")
    text += f" ({len(its):,} different ones)" if len(its) < total else ""
    return text + (f", {missing:,} of which {name} does not take" if missing else "")


def _paired(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {name: (one.get(name, NONE), other.get(name, NONE)) for name in {**one, **other}}


def _run_settings(one: Trace, other: Trace) -> dict[str, tuple[Any, Any]]:
    """Return the settings that two runs must have alike, by name: of the data, the model and the options."""
    same_size = one.size == other.size
    unlike = RUN_OPTIONS if same_size else RUN_OPTIONS | SIZE_OPTIONS
    aspects = [its for its in ASPECTS if same_size or its.across or its.name == "global_batch_size"]

    def settings(trace: Trace) -> dict[str, Any]:
        facts = {aspect.text: trace.facts[aspect.name] for aspect in aspects if aspect.name in trace.facts}
        shapes = {name: shape for rank in trace.ranks for name, shape in rank[min(rank)].line["shapes"].items()}
        options = {flag(name): value for name, value in trace.options.items() if name not in unlike}
        return {**facts, **shapes, **options}

    exchanged_by = one.facts.get("exchanged_by"), other.facts.get("exchanged_by")
    return _paired(settings(one), settings(other)) | ({EXCHANGE: exchanged_by} if all(exchanged_by) else {})


def _optimizer_settings(trace: Trace) -> dict[str, str]:
    """Return the optimizer's settings by name: `weight_decay`, and `weight_decay of group 1`."""
    return {
        key if number == 0 else f"{key} of group {number}": value
        for number, group in enumerate(trace.start["settings"])
        for key, value in group.items()
    }
