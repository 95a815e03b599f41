"""Two runs that differ, as the rules see them that know causes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hvd_trainer.tools.parity.findings import Finding
from hvd_trainer.tools.parity.traces import Trace

NEAR = 1e-3
"""How close a ratio is to the number that explains it; relative."""
ROUNDING = 1e-5
"""Relative differences up to here look like rounding in fp32."""
MOVED = 0.1
"""Weights that are so close were the same before something changed them; relative."""


class Cause(NamedTuple):
    """What may be the matter, and what to do about it."""

    text: str
    advice: str


@dataclass(frozen=True)
class Case:
    """Two runs, and all that differs at the first moment at which something does."""

    findings: Sequence[Finding]
    one: Trace
    other: Trace

    def get(self, quantity: str, *, among_ranks: bool = False) -> Finding | None:
        """What was found of a quantity: between the two runs, or among the ranks of one."""
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
    def most_ranks(self) -> int:
        return max(self.one.size, self.other.size)

    def larger(self, left: float, right: float) -> tuple[Trace, Trace, float]:
        """The run with the larger number, the other one, and how many times as large it is."""
        if abs(left) >= abs(right):
            return self.one, self.other, _ratio(left, right)
        return self.other, self.one, _ratio(right, left)


Rule = Callable[[Case], Iterator[Cause]]
"""Gives what fits; a rule knows one cause, and a cause has one rule."""


def near(ratio: float, number: float) -> bool:
    """Whether a ratio is this number, but for rounding."""
    return number > 0 and abs(ratio / number - 1) < NEAR


def some(names: Sequence[str]) -> str:
    """The first of many."""
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _ratio(large: float, small: float) -> float:
    return math.inf if small == 0 else large / small
