"""Compare two runs: all that differs at the first moment at which anything does.

    start         set-up, parameters, the optimizer's state, buffers
    each step     samples, learning rate, loss, gradients, their norm, parameters, the optimizer's state, buffers
    evaluation    buffers, figures

in this order, in which one quantity follows from another. A quantity that all ranks of a run should have in common
is compared among them before the runs are compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from hvd_trainer.config.checks import flag
from hvd_trainer.measure.equal_work import ASPECTS
from hvd_trainer.tools.parity.tensors import NONE, Finding, distance_between, find_unlike_tensors
from hvd_trainer.tools.parity.tolerance import Tolerance, expected_tolerance
from hvd_trainer.tools.parity.traces import VERSIONS, Moment, Trace
from hvd_trainer.utils.text import plural

MAX_EVALUATION_ROUNDING = 1e-5
"""The allowed relative difference of validation figures on unequal numbers of ranks: they evaluate in other
batches, and sum in another order, even where they train the same bits."""
RUN_OPTIONS = {"backend", "log_dir"}
"""Options that differ between any two runs."""
SETUP = "set-up"
EXCHANGE, EXCHANGED_BY = "what averages the gradients", "exchanged_by"
"""A setting of a script, where it is known of both runs, and the fact of a run that tells it."""
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
        """The largest relative difference of a parameter, by step, as far as its elements were kept."""
        return {
            when.step: max((apart.relative for apart in unlike), default=0.0)
            for when in self.steps
            for unlike in [find_unlike_tensors(self.one, self.other, when, "parameters")]
        }

    @property
    def name(self) -> str:
        return f"{self.one.name} and {self.other.name}"

    @property
    def same(self) -> bool:
        return not self.findings

    @cached_property
    def unlike_bits(self) -> Sequence[Finding]:
        """All that differs in any bit at the first moment at which anything does, whatever is allowed."""
        exact = expected_tolerance(self.one, self.other, 0.0)
        return self.findings if self.allowed.exact else _find_differences(self.one, self.other, exact)

    @cached_property
    def steps_of_same_parameters(self) -> set[int]:
        """The steps after which every bit of all parameters is the same, also of elements that were not kept."""
        unlike = (find_unlike_tensors(self.one, self.other, when, "parameters") for when in self.steps)
        return {when.step for when, findings in zip(self.steps, unlike, strict=True) if not any(findings)}

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
            if when.name == "start" and when < first:  # what goes into the first step does not follow from that
                inputs = replace(comparison, when=first, limit=partial(allowed.limit, first=True))
                findings += inputs.compare_inputs()
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
        yield from self._compare_named(SETUP, _settings(self.one, self.other))
        yield from self._compare_tensors("parameters")
        yield from self._compare_tensors("optimizer")
        yield from self._compare_tensors("buffers", alike=True)

    def compare_inputs(self) -> Iterator[Finding]:
        """Yield findings about what goes into a step."""
        lines = [*self.one.lines(self.when), *self.other.lines(self.when)]
        yield from self._compare_samples()
        yield from self._compare_figure("skipped", lambda line: line["skipped"])
        if not any(line["skipped"] for line in lines):  # a skipped step does not use its rate
            yield from self._compare_figure("learning rate", lambda line: tuple(line["lr"]))

    def _compare_step(self) -> Iterator[Finding]:
        lines = [*self.one.lines(self.when), *self.other.lines(self.when)]
        yield from self.compare_inputs()
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
            figures = [{name: value for name, value in side.items() if name == "val_loss"} for side in figures]
        elif self.one.size != self.other.size:
            limit = MAX_EVALUATION_ROUNDING
        yield from self._compare_named("evaluation", figures, limit)

    def _compare_named(
        self, quantity: str, values: Iterable[Mapping[str, Any]], limit: float = 0.0
    ) -> Iterator[Finding]:
        """Yield a finding if values of the same name differ between the two runs."""
        one, other = values
        sides, names = (self.one.name, self.other.name), {**one, **other}
        pairs = {name: (one.get(name, NONE), other.get(name, NONE)) for name in names}
        gaps = {name: distance_between(*pair).relative for name, pair in pairs.items()}
        unlike = {name: gap for name, gap in gaps.items() if gap > limit}
        if quantity == SETUP:  # each is a difference of its own
            yield from (
                Finding(self.when, quantity, sides, pairs[name], name, gap) for name, gap in unlike.items()
            )
            return
        yield from _first(
            Finding(self.when, quantity, sides, pairs[name], name, gap, total=len(names))
            for name, gap in unlike.items()
        )

    def _compare_figure(
        self, quantity: str, value_of: Callable[[Mapping[str, Any]], Any], limit: float = 0.0
    ) -> Iterator[Finding]:
        """Yield findings about a figure that all ranks of a run have in common."""
        one, other = ([value_of(line) for line in trace.lines(self.when)] for trace in (self.one, self.other))
        for trace, values in ((self.one, one), (self.other, other)):
            gaps = [distance_between(values[0], value).relative for value in values]
            for rank in [rank for rank, gap in enumerate(gaps) if gap > 0][:1]:
                sides, pair = ("rank 0", f"rank {rank}"), (values[0], values[rank])
                yield Finding(self.when, quantity, sides, pair, relative=gaps[rank], run=trace.name)
        yield from self._compare_named(quantity, [{"": one[0]}, {"": other[0]}], limit)

    def _compare_samples(self) -> Iterator[Finding]:
        one, other, when = self.one, self.other, self.when
        left, right = one.samples(when), other.samples(when)
        if left != right:
            values = _describe_samples(left, right, other.name), _describe_samples(right, left, one.name)
            yield Finding(when, "samples", (one.name, other.name), values)
        elif self.allowed.exact and one.size == other.size:
            left_ranks, right_ranks = ([line["samples"] for line in run.lines(when)] for run in (one, other))
            if left_ranks != right_ranks:  # sums round otherwise
                values = plural(left.total(), "sample"), "the same ones on other ranks, or in another order"
                yield Finding(when, "samples", (one.name, other.name), values)

    def _compare_losses(self) -> Iterator[Finding]:
        limit, runs = self.limit("loss"), (self.one, self.other)
        losses = [{"": run.loss(self.when)} for run in runs]
        if limit == 0 and self.one.size == self.other.size:
            lines = [enumerate(run.lines(self.when)) for run in runs]
            losses = [
                {f"rank {r}, pass {n}": loss for r, line in side for n, loss in enumerate(line["losses"], 1)}
                for side in lines
            ]
        yield from self._compare_named("loss", losses, limit)

    def _compare_tensors(self, kind: str, *, alike: bool = True) -> Iterator[Finding]:
        """Yield findings about the tensors of one kind.

        Args:
            alike: whether all ranks of a run must have equal tensors.
        """
        limit = self.limit(kind)
        for trace in (self.one, self.other) if alike else ():
            among = limit if self.allowed.everywhere else 0.0
            yield from _first(find_unlike_tensors(trace, trace, self.when, kind, among))
        if self.one.size != self.other.size and kind == "buffers" and self.when.name != "start":
            return  # each rank has statistics of its own samples
        yield from _first(find_unlike_tensors(self.one, self.other, self.when, kind, limit))


def _first(findings: Iterable[Finding]) -> Iterator[Finding]:
    """Yield the first of the findings about one quantity, with their number."""
    unlike = list(findings)
    for finding in unlike[:1]:
        yield replace(finding, count=len(unlike))


def _describe_samples(own: Counter[str], others: Counter[str], name: str) -> str:
    """Describe samples: `64 samples (32 different ones), 16 of which ddp does not take`."""
    total, missing = sum(own.values()), sum((own - others).values())
    text = plural(total, "sample")
    text += f" ({len(own):,} different ones)" if len(own) < total else ""
    return text + (f", {missing:,} of which {name} does not take" if missing else "")


def _settings(one: Trace, other: Trace) -> Iterator[dict[str, Any]]:
    """Yield the settings of each run that both must have alike, by name: of data, model, options, optimizer."""
    same_size = one.size == other.size
    unlike = RUN_OPTIONS if same_size else RUN_OPTIONS | SIZE_OPTIONS
    exchanges = (one.name, other.name) != VERSIONS and all(run.facts.get(EXCHANGED_BY) for run in (one, other))
    aspects = [row for row in ASPECTS if same_size or row.across or row.name == "global_batch_size"]

    for trace in (one, other):
        # It comes first, as the others may follow from it.
        exchange = {EXCHANGE: trace.facts[EXCHANGED_BY]} if exchanges else {}
        facts = {row.text: trace.facts[row.name] for row in aspects if row.name in trace.facts}
        shapes = {name: shape for rank in trace.ranks for name, shape in rank[min(rank)].line["shapes"].items()}
        options = {flag(name): value for name, value in trace.options.items() if name not in unlike}
        sent = {"the type in which gradients are sent": trace.compression} if trace.is_script else {}
        optimizer = {
            key if number == 0 else f"{key} of group {number}": value
            for number, group in enumerate(trace.start["settings"])
            for key, value in group.items()
        }
        yield {**exchange, **facts, **shapes, **options, **sent, **optimizer}
