"""Define what is found about two runs: the quantities that differ, and their causes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hvd_trainer.tools.parity.traces import Moment, Trace


@dataclass(frozen=True)
class Finding:
    """A quantity that differs."""

    when: Moment
    quantity: str
    """set-up, settings, samples, order, skipped, learning rate, loss, gradients, gradient norm, parameters,
    optimizer, buffers, evaluation, or steps"""
    sides: tuple[str, str]
    values: tuple[Any, Any]
    """for a tensor, its elements that are farthest apart"""
    name: str = ""
    """name of the first that differs"""
    absolute: float = 0.0
    relative: float = 0.0
    count: int = 1
    """how many differ"""
    total: int = 1
    """how many were compared"""
    run: str = ""
    """the run whose ranks differ among each other; empty where two runs do"""


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


def _ratio(large: float, small: float) -> float:
    return math.inf if small == 0 else large / small
