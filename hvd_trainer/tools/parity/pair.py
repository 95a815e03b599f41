"""Compare two runs and put the verdict in words."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from hvd_trainer.tools.parity.causes import Case, Cause, find_causes, repeats_samples, takes_same_samples
from hvd_trainer.tools.parity.findings import find_differences
from hvd_trainer.tools.parity.tensors import Finding, largest_difference
from hvd_trainer.tools.parity.tolerance import Tolerance, expected_tolerance
from hvd_trainer.tools.parity.traces import Trace
from hvd_trainer.utils.text import plural

QUANTITY_NAMES = {
    "set-up": "the set-up",
    "settings": "the optimizer's settings",
    "samples": "the samples",
    "order": "the order of the samples",
    "skipped": "whether the step is left out",
    "learning rate": "the learning rate",
    "loss": "the loss",
    "gradients": "the gradients",
    "gradient norm": "the gradient's norm",
    "parameters": "the parameters",
    "optimizer": "the optimizer's state",
    "buffers": "the buffers",
    "evaluation": "the test figures",
    "steps": "the number of steps",
}
TENSORS = ("gradients", "parameters", "optimizer", "buffers")


@dataclass(frozen=True)
class Pair:
    """Two runs, the findings and their causes."""

    one: Trace
    other: Trace
    allowed: Tolerance
    findings: Sequence[Finding]
    causes: Sequence[Cause]
    gaps: dict[int, float]
    """by step, the largest relative difference of a parameter; 0: the same bits"""

    @classmethod
    def compare(cls, one: Trace, other: Trace, asked: float | None = None) -> Pair:
        """Compare two runs.

        Args:
            asked: the tolerance that the user set; None: the expected one.
        """
        allowed = expected_tolerance(one, other, asked)
        findings = find_differences(one, other, allowed)
        causes = find_causes(Case(findings, one, other)) if findings else []
        both = sorted({*one.steps} & {*other.steps})
        return cls(
            one,
            other,
            allowed,
            findings,
            causes,
            {when.step: largest_difference(one, other, when) for when in both},
        )

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

    def verdict(self) -> str:
        """Return the verdict as one sentence."""
        if self.same:
            return f"{self.name}: {self._agreement(plural(len(self.gaps), 'step'))}"
        first = self.findings[0].when
        before = len([step for step in self.gaps if step < first.step + (first.name == "evaluation")])
        same = "the same bits" if self.allowed.exact else "alike"
        runs = {finding.run for finding in self.findings}
        among = (
            f"the ranks of {self.name} differ among each other" if runs == {self.one.name, self.other.name} else ""
        )
        return f"{among or f'{self.name} differ'} {first}" + (
            f", after {plural(before, 'step')} of {same}" if before else ""
        )

    def _agreement(self, steps: str) -> str:
        if self.allowed.exact:
            return f"the same bits through {steps}"
        most = max(self.gaps.values())
        if not most:
            return f"the same bits through {steps}, though they need not be"
        step = max(self.gaps, key=lambda step: self.gaps[step])
        allowed = self.allowed
        limits = (
            f"{allowed.tensors:g}"
            if allowed.everywhere
            else f"{allowed.tensors:g} in the first step, {allowed.later:g} later"
        )
        return (
            f"alike through {steps}. Parameters are up to {most:.1e} apart (step {step}); allowed are {limits} "
            f"({allowed.why})"
        )

    def details(self) -> Iterator[str]:
        """Yield the lines on what differs, its causes, and what to do; of equal runs on what is suspect."""
        if self.same:
            yield from self._warnings()
            return
        first, *others = self.findings
        yield f"First: {describe(first)}."
        rest = list(dict.fromkeys(summarize(finding) for finding in others))
        if rest:
            yield f"Also different there: {', '.join(rest)}."
        if not self.causes:
            yield "None of the known causes fits."
            return
        yield "A known cause fits:" if len(self.causes) == 1 else "Known causes that fit:"
        for text, advice in self.causes:
            yield f"- {text}."
            yield f"  To do: {advice}."

    def _warnings(self) -> Iterator[str]:
        """Yield what is the same in both runs, and yet is a mistake in most jobs."""
        steps = self.one.steps
        if steps and all(takes_same_samples(self.one, when) for when in steps):
            yield "Both train on the same samples on all ranks: is there no DistributedSampler?"
        elif any(repeats_samples(self.one, when) for when in steps):
            yield "Both go through the data in the same order in each epoch: is there no sampler.set_epoch(epoch)?"


def compare_all(traces: Sequence[Trace], asked: float | None = None) -> list[Pair]:
    """Compare each run with each other; of runs that have the same bits only the first is compared with the
    rest.
    """
    pairs: list[Pair] = []
    for one, other in combinations(traces, 2):
        if not any(pair.equal_bits and pair.other is one for pair in pairs):
            pairs.append(Pair.compare(one, other, asked))
    return pairs


def describe(its: Finding) -> str:
    """Describe a finding with its values: `the learning rate: 0.2 on horovod, 0.1 on ddp`."""
    text = QUANTITY_NAMES[its.quantity]
    if its.run:
        text += f", which the ranks of {its.run} should have in common"
    if its.quantity == "order":
        return f"{text}, on {its.name} and {its.total - 1} others" if its.count > 1 else f"{text}, on {its.name}"
    if its.total > 1:
        text += f" ({its.count:,} of {its.total:,} differ)"
    where = "with" if its.quantity in ("set-up", "settings") else "on"
    values = ", ".join(
        f"{format_value(value)} {where} {side}" for value, side in zip(its.values, its.sides, strict=True)
    )
    if its.quantity == "samples":
        values = "; ".join(f"{side} takes {value}" for value, side in zip(its.values, its.sides, strict=True))
    if not math.isfinite(its.relative) or its.quantity not in (*TENSORS, "loss", "gradient norm"):
        return f"{text}: {its.name} is {values}" if its.name else f"{text}: {values}"
    if its.quantity not in TENSORS:
        return f"{text}: {values}, a relative difference of {its.relative:.1e}"
    return (
        f"{text}. Of {its.name} the elements that are farthest apart are {values}; the whole tensor's relative "
        f"difference is {its.relative:.1e}"
    )


def summarize(its: Finding) -> str:
    """Describe a finding in a few words: `the gradients (8 of 8)`."""
    among = f" among the ranks of {its.run}" if its.run else ""
    return QUANTITY_NAMES[its.quantity] + among + (f" ({its.count:,} of {its.total:,})" if its.total > 1 else "")


def format_value(value: Any) -> str:
    """Format a value; floats get the nine digits that tell any two float32 apart."""
    if isinstance(value, tuple | list):
        return ", ".join(map(format_value, value))
    return f"{value:.9g}" if isinstance(value, float) else str(value)
