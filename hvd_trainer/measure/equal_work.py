"""List the properties of the work of a run that must be equal where runs are compared, and refuse unequal work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hvd_trainer.errors import OptionError


class Aspect(NamedTuple):
    """A property of the work that must be equal."""

    name: str
    text: str
    across: bool = True
    """also between different numbers of ranks"""
    advice: str = ""
    """a line of a script, or an option, that makes it equal"""


ASPECTS = (
    Aspect("train_data", "data set"),
    Aspect("train_samples", "samples per epoch"),
    Aspect("test_data", "test set"),
    Aspect("test_samples", "test samples"),
    Aspect("steps", "optimizer steps", across=False, advice="compare --steps N, which ends each run"),
    Aspect("samples", "samples", across=False, advice="DataLoader(..., sampler=DistributedSampler(dataset))"),
    Aspect("global_batch_size", "global batch", across=False),
    Aspect("passes", "passes per step", across=False),
    Aspect("rates", "learning rate", across=False),
    Aspect("precision", "precision"),
    Aspect("tf32", "TF32"),
    Aspect("channels_last", "channels last"),
    Aspect("skipped_steps", "skipped steps", across=False),
    Aspect("model", "model"),
    Aspect("parameters", "parameters"),
    Aspect("optimizer", "optimizer"),
    Aspect("device", "device"),
    Aspect("threads", "CPU threads per rank"),
)

TOLERANCE = 1e-9
"""Relative difference of learning rates, which two programs may compute in another order."""
PADDING = 0.02
"""Relative difference of samples: samplers may pad, or drop, the last batch of an epoch."""


class Side(NamedTuple):
    """A run, and the work that it did; properties that it does not report are not compared."""

    name: str
    ranks: int
    work: Mapping[str, Any]
    variant: str = ""
    """the values of options that are varied on purpose: only runs with the same ones are compared"""


def refuse_unequal(one: Side, other: Side) -> None:
    """Check that two runs have done the same work, as far as their numbers of ranks let them.

    Raises:
        OptionError: they have not; the message lists what differs.
    """
    if unequal := differences(one, other):
        lines = "\n".join(f"  {line}" for line in unequal)
        raise OptionError(
            f"{one.name} on {one.ranks} and {other.name} on {other.ranks} ranks have not done the same work, so "
            f"that their speeds say nothing about each other:\n{lines}\nMake the job do the same on all "
            f"of them: a changed job is measured again"
        )


def differences(one: Side, other: Side) -> list[str]:
    """Return a line for each property that differs.

    On other numbers of ranks, the steps are as many where the global batch is the same.
    """
    if one.variant != other.variant:
        return []
    same_ranks = one.ranks == other.ranks
    sizes = [side.work.get("global_batch_size") for side in (one, other)]
    same_batch = sizes[0] is not None and sizes[0] == sizes[1]
    lines = []
    for aspect in ASPECTS:
        wanted = same_ranks or aspect.across or (same_batch and aspect.name == "steps")
        if not wanted or aspect.name not in one.work or aspect.name not in other.work:
            continue
        left, right = one.work[aspect.name], other.work[aspect.name]
        if aspect.name == "rates":
            lines += _rates(left, right)
        elif left != right and not (aspect.name == "samples" and abs(left - right) <= PADDING * left):
            advice = f". Type: {aspect.advice}" if aspect.advice else ""
            lines.append(f"{aspect.text}: {_shown(left)} and {_shown(right)}{advice}")
    return lines


def _rates(one: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> list[str]:
    """Return a line about the first step whose learning rates differ."""
    left, right = ([rate for rate, count in runs for _ in range(int(count))] for runs in (one, other))
    for number, (a, b) in enumerate(zip(left, right, strict=False), 1):
        if abs(a - b) > TOLERANCE * max(abs(a), abs(b)):
            return [f"learning rate: {a:g} and {b:g} in step {number}"]
    return []


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:,}" if isinstance(value, int) else "none" if value is None else str(value)
