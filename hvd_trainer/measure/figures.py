"""Compute the figures of one run from the step times that its ranks have recorded (`steps.py`).

Waiting for other ranks has two causes. The last rank to arrive at an exchange waits only for the exchange itself;
what the others wait beyond that, they wait for it:

    rank 0   computes  |  waits  waits  |  exchange |
    rank 1   computes  computes  computes| exchange |       exchange = the shortest `reduce` of a step,
                                                            straggler = the mean of the ranks, less that
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import UNSET, Meta, Struct, UnsetType

from hvd_trainer.measure.steps import FOLDER
from hvd_trainer.observe.phases import COLLECTIVE, PHASES, exchange_s

STEP_PARTS = {
    "data": "fetching data",
    "forward": "forward",
    "backward": "backward",
    "exchange": "exchanging gradients",
    "straggler": "waiting for the slowest rank",
    "update": "the optimizer's update",
    "other": "the rest",
}
"""The parts of a step's time, over all ranks, in words."""
EXCHANGE_PARTS = ("exchange", "straggler")
"""Parts that are not seen of a script with DistributedDataParallel: they fall into its backward pass."""
RANKS_DIFFER = "ranks differ"
"""Stands for the checksum of final weights that are not the same on all ranks."""
LOSS_PARTS = 200
"""The final loss is the mean over this fraction of the steps: the last 1/200 of those that have a loss."""

MAX_STEPS = 10_000_000
"""Steps of a run whose figures are read from a file."""

Steps = Mapping[str, Any]
Positive = Annotated[float, Meta(gt=0)]


class Work(Struct):
    """What `read_figures` says of a run's work, as far as it is computed with."""

    on_trainer: bool
    steps: Annotated[int, Meta(ge=0, le=MAX_STEPS)]
    rates: list[tuple[float, int]]
    """learning rates, each with the number of its steps"""
    samples: int | UnsetType = UNSET
    global_batch_size: Positive | UnsetType = UNSET

    def __post_init__(self) -> None:
        if sum(count for _, count in self.rates) != self.steps:
            raise ValueError("as many rates as steps are needed")


RESULTS = ("train_loss", "last_loss", "val_loss", "train_accuracy", "val_accuracy", "peak_memory_mb", "bubble")
SPEEDS = ("step_s", "step_p50_s", "step_p95_s", "samples_per_s", "tokens_per_s")
Figures = msgspec.defstruct(
    "Figures",
    [
        ("work", Work),
        ("first_step_at", float),
        ("parts", dict[str, float] | UnsetType, UNSET),
        ("computing_s", list[float] | UnsetType, UNSET),
        ("weights", str | UnsetType, UNSET),
        *((name, float | None | UnsetType, UNSET) for name in RESULTS),
        *((name, Positive | UnsetType, UNSET) for name in SPEEDS),
    ],
)
"""The types of the figures of a run; None: no number, as the loss of a training that diverged."""


def are_figures(figures: Mapping[str, Any]) -> bool:
    """Return whether figures from a file, which may hold anything, are like those of a run."""
    try:
        msgspec.convert(figures, Figures)
    except msgspec.ValidationError:
        return False
    return True


def read_steps(log: Path) -> list[Steps]:
    """Return the recorded steps of each rank, in rank order.

    Raises:
        OSError, ValueError, KeyError: a file cannot be read.
    """
    files = sorted((log / FOLDER).glob("rank-*.npz"), key=lambda file: int(file.stem.partition("-")[2]))
    ranks: list[Steps] = []
    for file in files:
        with np.load(file) as arrays:
            ranks.append({name: arrays[name] for name in arrays.files})
    return ranks


def read_figures(log: Path, ranks: int, warmup_steps: int) -> dict[str, Any] | None:
    """Return all figures of a run, in plain JSON; None if the run did not come to its end."""
    with suppress(OSError, ValueError, KeyError):
        everyone = read_steps(log)
        if len(everyone) != ranks:
            return None
        results = [json.loads(str(rank["results"])) for rank in everyone]
        work = json.loads(str(everyone[0]["facts"]))
        on_trainer, sees_exchange = work["on_trainer"], work.pop("sees_exchange")
        in_parts, length = work.pop("in_parts", False), work.pop("sequence_length", None)
        # The Trainer counts those of all ranks; of a script each rank has its own, and none without a DataLoader.
        samples = everyone[0]["samples"] if on_trainer else sum(rank["samples"] for rank in everyone)
        if samples.all():
            work["samples"] = int(samples.sum())
            work.setdefault("global_batch_size", int(samples.max()))
        rates = [[rate, len(list(same))] for rate, same in itertools.groupby(everyone[0]["lr"].tolist())]
        work |= {
            "steps": len(everyone[0]["step"]),
            "rates": rates,
            "skipped_steps": int(everyone[0]["skipped"].sum()),
        }
        loss = last_loss(everyone)
        figures = {
            "work": work,
            "first_step_at": max(float(rank["first_step_at"]) for rank in everyone),
            "weights": _weights(everyone, in_parts=in_parts),
            **({} if loss is None else {"last_loss": loss}),
            **results[0],
            "peak_memory_mb": max(result["peak_memory_mb"] for result in results),
            **speed(everyone, samples, warmup_steps),
        }
        if not sees_exchange:  # DistributedDataParallel waits within the backward pass
            for part in (figures, figures.get("typical", {})):
                part.pop("computing_s", None)
                for name in EXCHANGE_PARTS:
                    part.get("parts", {}).pop(name, None)
        if length is not None and "samples_per_s" in figures:
            # Padding counts: it is computed like any other token.
            figures["tokens_per_s"] = figures["samples_per_s"] * length
        return figures
    return None


def _weights(ranks: Sequence[Steps], *, in_parts: bool) -> str:
    """Return a digest of the final weights, or of all ranks' parts of them."""
    digests = [str(rank["weights"]) for rank in ranks]
    if in_parts:
        return hashlib.sha256("".join(digests).encode()).hexdigest()
    return digests[0] if len(set(digests)) == 1 else RANKS_DIFFER


def speed(ranks: Sequence[Steps], samples: Any, warmup_steps: int) -> dict[str, Any]:
    """Return speed and parts of the steps after the warm-up, in seconds; empty if there are none.

    Args:
        samples: of each step, of all ranks; 0 where they are not seen.
    """
    seconds = np.stack([rank["seconds"] for rank in ranks])[:, warmup_steps:]  # (ranks, steps, parts)
    if seconds.shape[1] == 0:
        return {}
    steps = seconds.sum(axis=2).mean(axis=0)
    low, high = np.percentile(steps, 25, method="lower"), np.percentile(steps, 75, method="higher")
    rate = {"samples_per_s": float(samples[warmup_steps:].sum() / steps.sum())} if samples.all() else {}
    return {
        **rate,
        **times(seconds),
        "step_p50_s": float(np.percentile(steps, 50)),
        "step_p95_s": float(np.percentile(steps, 95)),
        # The middle half of the steps leaves out what happens now and then, such as other programs' time slices.
        "typical": times(seconds[:, (low <= steps) & (steps <= high)]),
    }


def times(seconds: Any) -> dict[str, Any]:
    """Return means over steps.

    Args:
        seconds: an array of shape (ranks, steps, parts).
    """
    means = seconds.mean(axis=(0, 1))
    exchange = float(exchange_s(seconds).mean())
    phases = {name: float(mean) for name, mean in zip(PHASES, means, strict=True)}
    shared = {"exchange": exchange, "straggler": phases["collective"] - exchange, "update": phases["step"]}
    parts = {**phases, **shared}
    computing = seconds.sum(axis=2).mean(axis=1) - seconds[:, :, COLLECTIVE].mean(axis=1)
    return {
        "step_s": float(means.sum()),
        "parts": {name: parts[name] for name in STEP_PARTS},
        "computing_s": [float(mean) for mean in computing],
    }


def last_loss(ranks: Sequence[Steps]) -> float | None:
    """Return the training loss at the end: the mean of the ranks that have one, and of the last steps of many.

    None if no rank has any.
    """
    losses = np.stack([rank["loss"] for rank in ranks])
    losses = losses[:, ~np.isnan(losses).all(axis=0)]
    count = max(1, losses.shape[1] // LOSS_PARTS)
    return float(np.nanmean(losses[:, -count:], axis=0).mean()) if losses.size else None
