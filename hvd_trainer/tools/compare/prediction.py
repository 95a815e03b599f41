"""Predict how long a step takes with the model in parts, by the formula of its schedule, from what was measured.

    step = base x share         share = 1 / (parts x (1 - bubble)), which is 1 for a model in one piece

`base` is the measured step of a trial that has the same options otherwise, the same batch of each replica, and
the model in one piece: one with as many replicas of the model, else one rank alone; with as many chunks, else with
one. Where nothing of the kind was measured, it is the naive pipeline: the same parts with one chunk, one of which
works at a time, so that its share is 1 too.

    2 ranks, 2 stages, 4 chunks, a batch of 32; 1 rank takes 100 ms for it
    bubble 1 / (4 + 1) = 0.2        share 1 / (2 x 0.8) = 0.625        step 62.5 ms

The formula knows of equal parts and of waiting for them. What the measurement shows besides is the rest: unequal
parts, sending, the exchange of gradients, chunks too small for the device, ranks that share cores. Where waiting
was measured as well, it is told from the rest: the same equation holds for the measured step and bubble, so that
waiting has made the step (1 - formula) / (1 - measured) times as long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hvd_trainer.config.batch_plan import BatchPlan
from hvd_trainer.parallel.schedule import bubble
from hvd_trainer.tools.compare.trials import Trial
from hvd_trainer.utils.text import plural

CUTTING = (
    *("stages", "devices_per_rank", "devices", "chunks", "schedule", "parts_per_stage", "balance"),
    *("batch_size", "global_batch_size"),
)
"""Options in which a base may differ; of the batches, those of each replica are compared."""


class Shape(NamedTuple):
    """How a trial cuts up model and batch."""

    replicas: int
    parts: int
    """of the model that work at the same time"""
    chunks: int
    batch_size: int
    """of each replica, in a backward pass"""
    bubble: float | None
    """the fraction of a step that the formula says is waiting; None where the model is in one piece"""

    @classmethod
    def of(cls, trial: Trial) -> Shape | None:
        """Return the shape of a trial; None if its options are not known, or cannot be."""
        options = None
        if options is None:
            return None
        parallel = options.parallel
        replicas, chunks = trial.ranks // parallel.stages, parallel.num_chunks
        parts, waiting = parallel.stages * parallel.num_devices, None
        if parallel.stages > 1:
            waiting = bubble(parallel.schedule, parallel.stages, chunks, parallel.parts_of_each)
        elif parts > 1:
            waiting = bubble("gpipe", parallel.num_devices, chunks)
        return cls(replicas, parts, chunks, BatchPlan.of(options.train, replicas).batch_size, waiting)

    @property
    def share(self) -> float:
        """The time of a step, where it takes 1 with the model in one piece."""
        return 1 / (self.parts * (1 - (self.bubble or 0)))


class Prediction(NamedTuple):
    """The time of a step, in seconds, and the trial that it was worked out from."""

    step_s: float
    base: Trial


def predict(trials: Sequence[Trial], measured: Mapping[str, float]) -> dict[str, Prediction]:
    """Return how long a step should take, by the keys of the trials that follow from another measured one.

    Args:
        measured: seconds per step, by the keys of trials.
    """
    shapes = [(trial, shape) for trial in trials if (shape := Shape.of(trial)) is not None]
    bases = [(trial, shape) for trial, shape in shapes if trial.key in measured]
    found = {}
    for trial, shape in shapes:
        fixed = _fixed(trial, shape)
        alike = [(base, its) for base, its in bases if base.key != trial.key and _fixed(base, its) == fixed]
        by_cut = {(its.replicas, its.parts, its.chunks): (base, its) for base, its in reversed(alike)}
        # (replicas, parts, chunks) of what a prediction starts from, the nearest first.
        one_piece = [(replicas, 1, chunks) for replicas in (shape.replicas, 1) for chunks in (shape.chunks, 1)]
        for cut in (*one_piece, (shape.replicas, shape.parts, 1)):
            if cut in by_cut:
                base, its = by_cut[cut]
                found[trial.key] = Prediction(measured[base.key] * shape.share / its.share, base)
                break
    return found


def _fixed(trial: Trial, shape: Shape) -> dict[str, Any]:
    """Return all that a base must have in common with a trial."""
    options = {name: value for name, value in trial.variant.identity["options"].items() if name not in CUTTING}
    return {"entry": trial.entry.name, "threads": trial.threads, "batch of a replica": shape.batch_size, **options}


def explain(wanted: Trial, base: Trial, off: float, waited: float | None, cores: int | None) -> list[str]:
    """Say how much of a difference was waiting, and what else applies that the formula leaves out.

    Args:
        base: what was predicted from.
        off: the relative difference.
        waited: the measured bubble, if there is one.
        cores: that the ranks share; None where they compute on GPUs.
    """
    shape, its = Shape.of(wanted), Shape.of(base)
    assert shape is not None
    assert its is not None
    found = []
    if waited is not None and shape.bubble is not None:
        waiting = (1 - shape.bubble) / (1 - waited)
        found.append(
            f"stages waited, sent and received for {waited:.0%} of it and not {shape.bubble:.0%}: "
            f"{waiting - 1:+.0%}; all else: {(1 + off) / waiting - 1:+.0%}"
        )
    threads = wanted.ranks * wanted.threads
    if cores is not None and threads > cores:
        found.append(f"{threads} threads on {plural(cores, 'core')}")
    if shape.replicas > its.replicas:
        found.append(f"{shape.replicas} copies of the model work at once, and exchange gradients")
    if shape.chunks > its.chunks:
        found.append(f"chunks of {-(-shape.batch_size // shape.chunks)} samples, one after the other")
    return found
