"""Compare two runs: all that differs at the first moment at which anything does.

    start         set-up, parameters, the optimizer's state, buffers
    each step     samples, learning rate, loss, gradients, their norm, parameters, the optimizer's state, buffers
    evaluation    buffers, figures

in this order, in which one quantity follows from another. A quantity that all ranks of a run should have in common
is compared among them before the runs are compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

from hvd_trainer.config.checks import flag
from hvd_trainer.measure.equal_work import ASPECTS
from hvd_trainer.tools.parity.tensors import (
    NONE,
    Finding,
    among_ranks,
    between_runs,
    distance_between,
    largest_difference,
)
from hvd_trainer.tools.parity.tolerance import Tolerance, expected_tolerance
from hvd_trainer.tools.parity.traces import VERSIONS, Moment, Trace
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

    @classmethod
    def compare(cls, one: Trace, other: Trace, asked: float | None = None) -> Pair:
        """Compare two runs.

        Args:
            asked: the tolerance that the user set; None: the expected one.
        """
        allowed = expected_tolerance(one, other, asked)
        return cls(one, other, allowed, _find_differences(one, other, allowed))

    @property
    def runs(self) -> tuple[Trace, Trace]:
        return self.one, self.other

    @property
    def steps(self) -> list[Moment]:
        """The steps that both have made."""
        return sorted({*self.one.steps} & {*self.other.steps})

    @cached_property
    def gaps(self) -> Mapping[int, float]:
        """The largest relative difference of a parameter, by step; 0: the same bits."""
        return {when.step: largest_difference(self.one, self.other, when) for when in self.steps}

    @property
    def name(self) -> str:
        return f"{self.one.name} and {self.other.name}"

    @property
    def same(self) -> bool:
        return not self.findings

    @property
    def at_start(self) -> bool:
        """Whether the runs differ before the first step."""
        return not self.same and self.findings[0].when.name == "start"

    def finding(self, quantity: str) -> Finding | None:
        """Return the first finding about a quantity; of all, where it is called `first`."""
        return next((one for one in self.findings if quantity in (one.quantity, "first")), None)


def _find_differences(one: Trace, other: Trace, allowed: Tolerance) -> list[Finding]:
    both = sorted({*one.moments} & {*other.moments})
    first = next((when for when in both if when.name == "step"), both[-1])
    for when in both:
        comparison = _MomentComparison(one, other, when, allowed, partial(allowed.limit, first=when <= first))
        if findings := list(comparison.findings()):
            return findings
    counts = len(one.steps), len(other.steps)
    return [Finding(both[-1], "steps", (one.name, other.name), counts)] if counts[0] != counts[1] else []


@dataclass(frozen=True)
class _MomentComparison:
    """Two runs at one moment."""

    one: Trace
    other: Trace
    when: Moment
    allowed: Tolerance
    limit: Callable[[str], float]
    """returns the relative difference that is allowed to a quantity at this moment"""

    def findings(self) -> Iterator[Finding]:
        kinds = {"start": self._compare_start, "step": self._compare_step, "evaluation": self._compare_evaluation}
        return kinds[self.when.name]()

    def _compare_start(self) -> Iterator[Finding]:
        yield from self._compare_named("set-up", _settings(self.one, self.other))
        yield from self._compare_tensors("parameters")
        yield from self._compare_tensors("optimizer")
        yield from self._compare_tensors("buffers", alike=True)

    def _compare_step(self) -> Iterator[Finding]:
        lines = [*self.one.lines(self.when), *self.other.lines(self.when)]
        yield from self._compare_samples()
        yield from self._compare_figure("skipped", lambda line: line["skipped"])
        if not any(line["skipped"] for line in lines):  # a skipped step does not use its rate
            yield from self._compare_figure("learning rate", lambda line: tuple(line["lr"]))
        yield from self._compare_losses()
        yield from self._compare_tensors("gradients")
        if all(line["grad_norm"] is not None for line in lines):
            limit = self.limit("gradient norm")
            yield from self._compare_figure("gradient norm", lambda line: line["grad_norm"], limit)
        yield from self._compare_tensors("parameters")
        yield from self._compare_tensors("optimizer")
        yield from self._compare_tensors("buffers", alike=self.one.options["reproducible"] is not None)

    def _compare_evaluation(self) -> Iterator[Finding]:
        yield from self._compare_tensors("buffers", alike=True)
        figures = [trace.lines(self.when)[0]["figures"] for trace in (self.one, self.other)]
        limit = self.limit("loss")
        if not self.allowed.exact:
            # One sample that changes its predicted class changes an accuracy by more than any rounding.
            figures = [{name: value for name, value in side.items() if name == "test_loss"} for side in figures]
        elif self.one.size != self.other.size:
            limit = MAX_EVALUATION_ROUNDING
        yield from self._compare_named("evaluation", _paired(*figures), limit)

    def _finding(self, quantity: str, values: tuple[Any, Any], **more: Any) -> Finding:
        return Finding(self.when, quantity, (self.one.name, self.other.name), values, **more)

    def _compare_named(
        self, quantity: str, pairs: Mapping[str, tuple[Any, Any]], limit: float = 0.0
    ) -> Iterator[Finding]:
        """Yield a finding if values of the same name differ."""
        apart = {name: gap for name, pair in pairs.items() if (gap := _difference(*pair)) > limit}
        for name, relative in [*apart.items()][:1]:
            more = {"count": len(apart), "total": len(pairs)}
            yield self._finding(quantity, pairs[name], name=name, relative=relative, **more)

    def _compare_figure(
        self, quantity: str, value_of: Callable[[Mapping[str, Any]], Any], limit: float = 0.0
    ) -> Iterator[Finding]:
        """Yield findings about a figure that all ranks of a run have in common."""
        for trace in (self.one, self.other):
            first, *others = map(value_of, trace.lines(self.when))
            ranks = [rank for rank, value in enumerate(others, 1) if _difference(first, value) > 0]
            for rank in ranks[:1]:
                sides, values = ("rank 0", f"rank {rank}"), (first, others[rank - 1])
                yield Finding(self.when, quantity, sides, values, run=trace.name)
        one, other = (value_of(trace.lines(self.when)[0]) for trace in (self.one, self.other))
        yield from self._compare_named(quantity, {"": (one, other)}, limit)

    def _compare_samples(self) -> Iterator[Finding]:
        one, other, when = self.one, self.other, self.when
        left, right = one.samples(when), other.samples(when)
        if left != right:
            values = _describe_samples(left, right, other.name), _describe_samples(right, left, one.name)
            yield self._finding("samples", values)
        elif self.allowed.exact and one.size == other.size:
            left_ranks, right_ranks = ([line["samples"] for line in run.lines(when)] for run in (one, other))
            if left_ranks != right_ranks:  # sums round otherwise
                values = plural(left.total(), "sample"), "the same ones on other ranks, or in another order"
                yield self._finding("samples", values)

    def _compare_losses(self) -> Iterator[Finding]:
        one, other, limit = self.one, self.other, self.limit("loss")
        pairs = {"": (one.loss(self.when), other.loss(self.when))}
        if limit == 0 and one.size == other.size:
            pairs = {
                f"rank {rank}, pass {number}": pair
                for rank, lines in enumerate(zip(one.lines(self.when), other.lines(self.when), strict=True))
                for number, pair in enumerate(zip(*(line["losses"] for line in lines), strict=False), 1)
            }
        yield from self._compare_named("loss", pairs, limit)

    def _compare_tensors(self, kind: str, *, alike: bool = True) -> Iterator[Finding]:
        """Yield findings about the tensors of one kind.

        Args:
            alike: whether all ranks of a run must have equal tensors.
        """
        limit = self.limit(kind)
        for trace in (self.one, self.other):
            if alike:
                yield from among_ranks(trace, self.when, kind, limit if self.allowed.everywhere else 0.0)
        if self.one.size != self.other.size and kind == "buffers" and self.when.name != "start":
            return  # each rank has statistics of its own samples
        yield from between_runs(self.one, self.other, self.when, kind, limit)


def _difference(one: Any, other: Any) -> float:
    """Return 0 for equal values, the relative difference of two floats, and infinity for anything else that
    differs.
    """
    if isinstance(one, float) and isinstance(other, float):
        left, right = (torch.tensor([side], dtype=torch.float64) for side in (one, other))
        return distance_between(left, right).relative
    return 0.0 if one == other else float("inf")


def _describe_samples(own: Counter[str], others: Counter[str], name: str) -> str:
    """Describe samples: `64 samples (32 different ones), 16 of which ddp does not take`."""
    total, missing = sum(own.values()), sum((own - others).values())
    text = plural(total, "sample")
    text += f" ({len(own):,} different ones)" if len(own) < total else ""
    return text + (f", {missing:,} of which {name} does not take" if missing else "")


def _paired(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {name: (one.get(name, NONE), other.get(name, NONE)) for name in {**one, **other}}


def _settings(one: Trace, other: Trace) -> dict[str, tuple[Any, Any]]:
    """Return the settings that two runs must have alike, by name: of data, model, options and optimizer."""
    same_size = one.size == other.size
    unlike = RUN_OPTIONS if same_size else RUN_OPTIONS | SIZE_OPTIONS
    aspects = [row for row in ASPECTS if same_size or row.across or row.name == "global_batch_size"]

    def settings(trace: Trace) -> dict[str, Any]:
        facts = {row.text: trace.facts[row.name] for row in aspects if row.name in trace.facts}
        shapes = {name: shape for rank in trace.ranks for name, shape in rank[min(rank)].line["shapes"].items()}
        options = {flag(name): value for name, value in trace.options.items() if name not in unlike}
        sent = {"the type in which gradients are sent": trace.compression} if trace.is_script else {}
        optimizer = {
            key if number == 0 else f"{key} of group {number}": value
            for number, group in enumerate(trace.start["settings"])
            for key, value in group.items()
        }
        return {**facts, **shapes, **options, **sent, **optimizer}

    exchanged_by = one.facts.get("exchanged_by"), other.facts.get("exchanged_by")
    is_set_up_alike = all(exchanged_by) and (one.name, other.name) != VERSIONS
    # It comes first, as the others may follow from it.
    return {**({EXCHANGE: exchanged_by} if is_set_up_alike else {}), **_paired(settings(one), settings(other))}
