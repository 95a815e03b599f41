"""List the properties of the work of a run that must be equal where runs are compared, and refuse unequal work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from hvd_trainer.errors import OptionError
from hvd_trainer.measure.trials import RunRecord


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
    Aspect("val_data", "validation set"),
    Aspect("val_samples", "validation samples"),
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


def refuse_unequal(one: RunRecord, other: RunRecord) -> None:
    """Check that two runs have done the same work, as far as their numbers of ranks let them.

    Raises:
        OptionError: they have not; the message lists what differs.
    """
    if unequal := differences(one, other):
        lines = "\n".join(f"  {line}" for line in unequal)
        names = " and ".join(f"{run.identity['entry']} on {run.identity['ranks']}" for run in (one, other))
        raise OptionError(
            f"{names} ranks have not done the same work, so that their speeds say nothing about each other:\n"
            f"{lines}\nMake the job do the same on all of them: a changed job is measured again"
        )


def differences(one: RunRecord, other: RunRecord) -> list[str]:
    """Return a line for each property that differs; those that a run does not report are not compared.

    On other numbers of ranks, the steps are as many where the global batch is the same.
    """
    works = [run.figures["work"] for run in (one, other)]
    same_ranks = one.identity["ranks"] == other.identity["ranks"]
    sizes = [work.get("global_batch_size") for work in works]
    same_batch = sizes[0] is not None and sizes[0] == sizes[1]
    lines = []
    for aspect in ASPECTS:
        wanted = same_ranks or aspect.across or (same_batch and aspect.name == "steps")
        if not wanted or not all(aspect.name in work for work in works):
            continue
        left, right = (work[aspect.name] for work in works)
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
