"""Define the input of the rules that know causes: two runs that differ."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hvd_trainer.tools.parity.findings import Finding
from hvd_trainer.tools.parity.traces import Trace

MAX_RATIO_ERROR = 1e-3
"""The relative difference between a ratio and the number that explains it."""
MAX_ROUNDING = 1e-5
"""The relative difference up to which rounding in fp32 explains it."""
MAX_WEIGHT_CHANGE = 0.1
"""The relative difference up to which weights were equal before something changed them."""


class Cause(NamedTuple):
    """A possible cause, and what to do about it."""

    text: str
    advice: str


@dataclass(frozen=True)
class Case:
    """Two runs, and all that differs at the first moment at which anything does."""

    findings: Sequence[Finding]
    one: Trace
    other: Trace

    def get(self, quantity: str, *, among_ranks: bool = False) -> Finding | None:
        """Return the finding about a quantity, between the two runs or among the ranks of one; None if there is
        none.
        """
        return next((f for f in self.findings if f.quantity == quantity and bool(f.run) == among_ranks), None)

    @property
    def first(self) -> Finding:
        return self.findings[0]

    @property
    def at_start(self) -> bool:
        return self.first.when.name == "start"

    @property
    def runs(self) -> tuple[Trace, Trace]:
        return self.one, self.other

    @property
    def sizes_differ(self) -> bool:
        return self.one.size != self.other.size

    @property
    def max_ranks(self) -> int:
        return max(self.one.size, self.other.size)

    def by_size(self, left: float, right: float) -> tuple[Trace, Trace, float]:
        """Return the run with the larger number, the other run, and how many times as large the number is."""
        if abs(left) >= abs(right):
            return self.one, self.other, _ratio(left, right)
        return self.other, self.one, _ratio(right, left)


Rule = Callable[[Case], Iterator[Cause]]
"""Yields its cause if the case fits it; a rule knows one cause, and a cause has one rule."""


def is_near(ratio: float, number: float) -> bool:
    """Return whether a ratio is this number, but for rounding."""
    return number > 0 and abs(ratio / number - 1) < MAX_RATIO_ERROR


def first_few(names: Sequence[str]) -> str:
    """Join the first three names."""
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _ratio(large: float, small: float) -> float:
    return math.inf if small == 0 else large / small
