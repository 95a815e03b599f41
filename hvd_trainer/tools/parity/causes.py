"""Find the known causes that fit the differences between two runs: the table is causes.yaml, in the order in which
they act.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import NamedTuple

import msgspec

from hvd_trainer.tools.parity import fits
from hvd_trainer.tools.parity.comparison import Pair


class Cause(NamedTuple):
    """A possible cause, and what to do about it."""

    text: str
    advice: str


class Known(msgspec.Struct, forbid_unknown_fields=True):
    """A row of the table. Of the rows about one quantity the first that fits is a cause."""

    quantity: str
    """what must differ, `first` standing for whatever is the first finding"""
    when: str
    """the function of fits.py that tells whether it fits the first finding about that quantity, which is one among
    ranks if there is any"""
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
        fit: fits.Fit = getattr(fits, known.when)(pair, finding)
        if fit is not None:
            one, other = finding.values
            values = {"run": finding.run, "name": finding.name, "one": one, "other": other, **fit}
            causes[known.quantity] = Cause(known.text.format(**values), known.advice.format(**values))
    return list(causes.values())
