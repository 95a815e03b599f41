"""How long a step should take, by the formula of its schedule, from what was measured without stages.

    step = base x share         share = 1 / (parts x (1 - bubble)), which is 1 for a model in one piece

`base` is the measured step of a configuration that has the same options otherwise, the same batch of each copy,
and the model in one piece: one with as many copies of the model, else one rank alone; with as many chunks, else
with one. Where nothing of the kind was measured, it is the naive pipeline: the same parts with one chunk, one of
which works at a time, so that its share is 1 too.

    2 ranks, 2 stages, 4 chunks, a batch of 32; 1 rank takes 100 ms for it
    bubble 1 / (4 + 1) = 0.2        share 1 / (2 x 0.8) = 0.625        step 62.5 ms

The formula knows of equal parts and of waiting for them. What the measurement shows besides is the rest: unequal
parts, sending, the exchange of gradients, chunks too small for the device, ranks that share cores. Where waiting
was measured as well, it is told from the rest: the same equation holds for the measured step and bubble, so that
waiting has made the step (1 - formula) / (1 - measured) times as long.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from hvd_trainer.tools.grid.configurations import RANKS, Configuration

CUTTING = (
    *("stages", "devices_per_rank", "devices", "chunks", "schedule", "parts_per_stage", "balance"),
    *("batch_size", "global_batch_size"),
)
"""Options in which a base may differ; of the batches each copy's is compared."""


class Prediction(NamedTuple):
    """A step's time, and what it was worked out from."""

    step_s: float
    base: Configuration


def predict(
    wanted: Configuration, measured: Mapping[str, float], all_of_them: Sequence[Configuration], sized: str | None
) -> Prediction | None:
    """What a configuration's step should take; None where nothing was measured that it follows from.

    Args:
        measured: seconds per step, by the keys of configurations.
        all_of_them: the configurations of the grid that can be.
        sized: the job's option for the number of samples, which has no influence on a step.
    """
    others = [c for c in all_of_them if c.key in measured and c.key != wanted.key]
    kin = [c for c in others if _alike(c, sized) == _alike(wanted, sized)]
    for copies, parts, chunks in _bases(wanted):
        for base in kin:
            if (base.copies, base.parts, base.chunks) == (copies, parts, chunks):
                return Prediction(measured[base.key] * share(wanted) / share(base), base)
    return None


def share(configuration: Configuration) -> float:
    """A step's time with the model in parts, where it takes 1 in one piece."""
    return 1 / (configuration.parts * (1 - (configuration.bubble or 0)))


def why_off(
    wanted: Configuration, base: Configuration, figures: Mapping[str, float], cores: int | None
) -> list[str]:
    """How much of the difference was waiting, and what else the formula leaves out that is the case here.

    Args:
        base: what was predicted from.
        figures: of the row; with `off`.
        cores: that the ranks share; None where they compute on GPUs.
    """
    found = []
    if "bubble" in figures and "bubble_formula" in figures:
        measured, formula = figures["bubble"], figures["bubble_formula"]
        waiting = (1 - formula) / (1 - measured)
        rest = (1 + figures["off"]) / waiting
        found.append(
            f"stages waited, sent and received for {measured:.0%} of it and not {formula:.0%}: "
            f"{waiting - 1:+.0%}; all else: {rest - 1:+.0%}"
        )
    threads = wanted.ranks * wanted.threads
    if cores is not None and threads > cores:
        found.append(f"{threads} threads on {cores} {'core' if cores == 1 else 'cores'}")
    if wanted.copies > base.copies:
        found.append(f"{wanted.copies} copies of the model work at once, and exchange gradients")
    if wanted.chunks > base.chunks:
        found.append(f"chunks of {-(-wanted.batch_size // wanted.chunks)} samples, one after the other")
    return found


def _bases(wanted: Configuration) -> Iterator[tuple[int, int, int]]:
    """(copies, parts, chunks) of what a prediction starts from, the nearest first."""
    for copies in (wanted.copies, 1):
        for chunks in (wanted.chunks, 1):
            yield copies, 1, chunks
    yield wanted.copies, wanted.parts, 1


def _alike(configuration: Configuration, sized: str | None) -> dict[str, Any]:
    """All that a base must have in common with it."""
    left_out = {RANKS, *CUTTING, sized}
    same = {name: value for name, value in configuration.identity.items() if name not in left_out}
    return same | {"batch of a copy": configuration.batch_size}
