"""Compute the figures of one run from the step times that its ranks have recorded (`step_timer.py`).

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
import yaml
from msgspec import UNSET, Meta, Struct, UnsetType

from hvd_trainer.checkpoint.export import NAME as WEIGHTS
from hvd_trainer.observe.phases import PARTS, REDUCE, exchange_s
from hvd_trainer.observe.run_folder import CONFIG, FACTS, METRICS
from hvd_trainer.observe.step_timer import FOLDER

STEP_PARTS = ("data", "forward", "backward", "exchange", "straggler", "step", "other")
"""The parts of a step's time, over all ranks."""
EXCHANGE_PARTS = ("exchange", "straggler")
"""Parts that are not seen of a script with DistributedDataParallel: they fall into its backward pass."""
RANKS_DIFFER = "ranks differ"
"""Stands for the checksum of final weights that are not the same on all ranks."""
SPEEDS = ("step_s", "step_p50_s", "step_p95_s", "samples_per_s", "tokens_per_s")
LISTS = ("computing_s", "percentiles_s")
MAX_CURVE_POINTS = 200
"""Points of a curve."""
MAX_STEPS = 10_000_000
"""Steps of a run whose figures are read from a file."""
RESULTS = (
    "train_loss",
    "last_loss",
    "test_loss",
    "train_accuracy",
    "test_accuracy",
    "peak_memory_mb",
    "base_memory_mb",
)

Positive = Annotated[float, Meta(gt=0)]
Steps = Mapping[str, Any]


class Work(Struct):
    """What `read_figures` and `read_probed` say of a run's work, as far as it is computed with."""

    steps: Annotated[int, Meta(ge=0, le=MAX_STEPS)]
    rates: list[tuple[float, int]]
    """learning rates, each with the number of its steps"""
    samples: int | UnsetType = UNSET
    global_batch_size: Positive | UnsetType = UNSET

    def __post_init__(self) -> None:
        if sum(count for _, count in self.rates) != self.steps:
            raise ValueError("as many rates as steps are needed")


SCRIPT_PARTS = tuple(name for name in STEP_PARTS if name not in EXCHANGE_PARTS)
Parts = msgspec.defstruct(
    "Parts",
    [*((name, float) for name in SCRIPT_PARTS), *((name, float | UnsetType, UNSET) for name in EXCHANGE_PARTS)],
)
Figures = msgspec.defstruct(
    "Figures",
    [
        ("work", Work),
        ("first_step_at", float),
        ("parts", Parts | UnsetType, UNSET),
        *((name, float | UnsetType, UNSET) for name in (*RESULTS, "bubble")),
        *((name, Positive | UnsetType, UNSET) for name in SPEEDS),
        *((name, list[float] | UnsetType, UNSET) for name in LISTS),
        ("curve", list[tuple[float, float]] | UnsetType, UNSET),
        ("weights", str | None, None),
    ],
)
"""The types of the figures of a run."""


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
    """Return all figures of a run of a job, in plain JSON; None if the run did not come to its end.

    Args:
        log: its log folder.
        ranks: how many it was started with.
        warmup_steps: that do not count.
    """
    with suppress(OSError, ValueError, KeyError, IndexError):
        end = json.loads((log / METRICS).read_text().splitlines()[-1])
        everyone = read_steps(log)
        if end["event"] != "end" or len(everyone) != ranks:
            return None
        first = everyone[0]
        samples, skipped = int(first["samples"].sum()), int(first["skipped"].sum())
        work = {**json.loads((log / FACTS).read_text()), "samples": samples, "skipped_steps": skipped}
        results = {name: end[name] for name in RESULTS if isinstance(end.get(name), int | float)}
        figures = {**_common(everyone, work), "weights": checksum(log), **results, **speed(everyone, warmup_steps)}
        length = yaml.safe_load((log / CONFIG).read_text()).get("sequence_length")
        if isinstance(length, int) and "samples_per_s" in figures:
            # Padding counts: it is computed like any other token.
            figures["tokens_per_s"] = figures["samples_per_s"] * length
        return figures
    return None


def read_probed(log: Path, ranks: int, warmup_steps: int) -> dict[str, Any] | None:
    """Return the figures of a script that is not built on the Trainer, as far as `tools/probe` records them."""
    with suppress(OSError, ValueError, KeyError):
        everyone = read_steps(log)
        if len(everyone) != ranks:
            return None
        first = everyone[0]
        work = {"parameters": int(first["parameters"]), "world_size": int(first["world_size"])}
        # Each rank has its own; `speed` counts those of all. Without a DataLoader none are seen.
        samples = sum(rank["samples"] for rank in everyone)
        known = {"samples": samples} if samples.all() else {}
        if known:
            work |= {"samples": int(samples.sum()), "global_batch_size": int(samples.max())}
        everyone = [{name: rank[name] for name in rank if name != "samples"} | known for rank in everyone]
        figures = speed(everyone, warmup_steps)
        for its in (figures, figures.get("typical", {})):
            if its.get("parts", {}).get("exchange") == 0:  # DistributedDataParallel waits within the backward pass
                del its["computing_s"]
                for part in EXCHANGE_PARTS:
                    del its["parts"][part]
        common = _common(everyone, work | json.loads(str(first["facts"])))
        weights = {str(rank["weights"]) for rank in everyone}
        return {
            **common,
            "weights": weights.pop() if len(weights) == 1 else RANKS_DIFFER,
            **({"last_loss": common["curve"][-1][1]} if common["curve"] else {}),
            "peak_memory_mb": max(float(rank["peak_memory_mb"]) for rank in everyone),
            **figures,
        }
    return None


def _common(ranks: Sequence[Steps], work: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures that both kinds of job have; steps and learning rates are added to the work."""
    rates = [[rate, len(list(same))] for rate, same in itertools.groupby(ranks[0]["lr"].tolist())]
    return {
        "work": {**work, "steps": len(ranks[0]["step"]), "rates": rates},
        "curve": curve(ranks),
        "first_step_at": max(float(rank["first_step_at"]) for rank in ranks),
    }


def are_figures(figures: Mapping[str, Any]) -> bool:
    """Return whether figures from a file, which may hold anything, are like those of a run."""
    try:
        msgspec.convert(figures, Figures)
    except msgspec.ValidationError:
        return False
    return True


def speed(ranks: Sequence[Steps], warmup_steps: int) -> dict[str, Any]:
    """Return speed and parts of the steps after the warm-up, in seconds; empty if there are none."""
    seconds = np.stack([rank["seconds"] for rank in ranks])[:, warmup_steps:]  # (ranks, steps, parts)
    if seconds.shape[1] == 0:
        return {}
    steps = seconds.sum(axis=2).mean(axis=0)
    low, high = np.percentile(steps, (25, 75))
    rate = {}
    if "samples" in ranks[0]:
        rate["samples_per_s"] = float(ranks[0]["samples"][warmup_steps:].sum() / steps.sum())
    if "busy_s" in ranks[0]:
        busy = sum(float(rank["busy_s"][warmup_steps:].sum()) for rank in ranks)
        rate["bubble"] = 1 - busy / float(seconds.sum())
    return {
        **rate,
        **times(seconds),
        "step_p50_s": float(np.percentile(steps, 50)),
        "step_p95_s": float(np.percentile(steps, 95)),
        "counted_steps": len(steps),
        "percentiles_s": [float(value) for value in np.percentile(steps, range(0, 101, 2))],
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
    parts = {name: float(mean) for name, mean in zip(PARTS, means, strict=True) if name != "reduce"}
    parts |= {"exchange": exchange, "straggler": float(means[REDUCE]) - exchange}
    computing = seconds.sum(axis=2).mean(axis=1) - seconds[:, :, REDUCE].mean(axis=1)
    return {
        "step_s": float(means.sum()),
        "parts": {name: parts[name] for name in STEP_PARTS},
        "computing_s": [float(mean) for mean in computing],
    }


def curve(ranks: Sequence[Steps]) -> list[list[float]]:
    """Return pairs of step and training loss, averaged over the ranks that have one and over a few steps."""
    losses = np.stack([rank["loss"] for rank in ranks])
    known = ~np.isnan(losses).all(axis=0)
    steps, losses = ranks[0]["step"][known], losses[:, known]
    if losses.size == 0:
        return []
    means = np.nanmean(losses, axis=0)
    groups = min(MAX_CURVE_POINTS, len(means))
    return [
        [float(steps[piece].mean()), float(means[piece].mean())]
        for piece in np.array_split(np.arange(len(means)), groups)
    ]


def checksum(log: Path) -> str | None:
    """Return the SHA-256 of the final weights; None if there are none."""
    with suppress(OSError):
        return hashlib.sha256((log / WEIGHTS).read_bytes()).hexdigest()
    return None
