"""Read what a job has computed, step by step, on all of its ranks (written by `measure/trace.py`)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hvd_trainer.measure.trace_format import FACTS, FOLDER

EVENTS = ("start", "step", "evaluation")
"""In the order of the events of one step."""
SCRIPT_OPTIONS: dict[str, Any] = {
    "precision": "fp32",
    "reproducible": None,
    "accumulate": 1,
    "sync_batch_norm": False,
}
"""Stand for the options of the Trainer in the trace of a script, which has none of them."""
VERSIONS = ("old", "new")
"""Names of two versions of one script, which may set themselves up in different ways."""
PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
"""From the lowest, by the type of parameters."""
SENT_AS = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""The types in which gradients are compressed, that with fewer digits first."""
MIN_VALUES = 32
"""Different gradients from which their bits tell in which type they were sent; a few may be whole numbers."""


class Moment(NamedTuple):
    """A point in a training: a step, and what was recorded in it."""

    step: int
    event: int
    """its number in `EVENTS`"""

    @property
    def name(self) -> str:
        return EVENTS[self.event]

    def __str__(self) -> str:
        words = {"start": "before the first step", "step": f"in step {self.step}"}
        return words.get(self.name, f"in the evaluation after step {self.step}")


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The state of one rank at one moment."""

    line: Mapping[str, Any]
    values: Callable[[], Mapping[str, Tensor]]
    """reads the tensors, flat, by kind and name: `gradients/fc1.weight`"""

    def checksums(self, kind: str) -> Mapping[str, str]:
        """Return the checksums of gradients, parameters, optimizer or buffers, by tensor name."""
        sums: Mapping[str, str] = self.line["checksums"].get(kind, {})
        return sums


@dataclass(frozen=True)
class Trace:
    """The snapshots of all ranks of one run."""

    name: str
    """name of the engine, or one of `VERSIONS`"""
    facts: Mapping[str, Any]
    """content of run.json"""
    options: Mapping[str, Any]
    """options of the job, by their flat names"""
    ranks: Sequence[Mapping[Moment, Snapshot]]
    is_script: bool = False
    """whether the job was not built on the Trainer"""

    @property
    def precision(self) -> str:
        """The lowest precision of its parameters and its --precision."""
        types = {shape.partition(" ")[0] for shape in self.start["shapes"].values()}
        lowest = next((name for kind, name in PRECISIONS.items() if kind in types), "fp32")
        asked: str = self.options["precision"]
        return lowest if asked == "fp32" else asked

    @cached_property
    def compression(self) -> str:
        """The type in which gradients are sent if it is not their own: as asked for, or of a script as the bits of
        its first gradients show, unless it has changed them since, as by clipping; else `none`.
        """
        if not self.is_script:
            return str(self.options["compression"])
        values = self.ranks[0][self.steps[0]].values() if self.steps else {}
        kept = [value for name, value in values.items() if name.startswith("gradients/")]
        gradients = torch.cat([torch.zeros(0), *(value for value in kept if value.dtype == torch.float32)])
        if len(gradients.unique()) < MIN_VALUES:
            return "none"
        fits = (name for name, kind in SENT_AS.items() if torch.equal(gradients, gradients.to(kind).float()))
        return next(fits, "none")

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def start(self) -> Mapping[str, Any]:
        """The line that rank 0 wrote about itself and the model before training."""
        return self.ranks[0][min(self.ranks[0])].line

    @cached_property
    def moments(self) -> list[Moment]:
        """The moments that all ranks have, in order."""
        return sorted(set.intersection(*(set(rank) for rank in self.ranks)))

    @cached_property
    def steps(self) -> list[Moment]:
        return [when for when in self.moments if when.name == "step"]

    @cached_property
    def repeats(self) -> frozenset[Moment]:
        """The steps with the samples of an earlier one, as the same step of an earlier epoch has them."""
        firsts: dict[frozenset[tuple[str, int]], Moment] = {}
        taken = {when: frozenset(self.samples(when).items()) for when in self.steps}
        return frozenset(
            when for when, samples in taken.items() if samples and firsts.setdefault(samples, when) != when
        )

    def lines(self, when: Moment) -> list[Mapping[str, Any]]:
        """Return the line of each rank at a moment."""
        return [rank[when].line for rank in self.ranks]

    def loss(self, when: Moment) -> float:
        """Return the mean loss over the samples of all ranks; NaN where no rank has a loss."""
        pairs = [pair for line in self.lines(when) for pair in _weighted(line)]
        weight = sum(count for _, count in pairs)
        return sum(loss * count for loss, count in pairs) / weight if weight else float("nan")

    def grad_norm(self, when: Moment) -> float | None:
        """Return the gradient norm on rank 0; None if it was not computed."""
        norm: float | None = self.lines(when)[0]["grad_norm"]
        return norm

    def samples(self, when: Moment) -> Counter[str]:
        """Count how often each sample was taken by all ranks; the stages of one replica take the same samples,
        counted once.
        """
        taken: dict[int, list[str]] = {}
        for rank, line in zip(self.ranks, self.lines(when), strict=True):
            taken.setdefault(rank[min(rank)].line["copy"], line["samples"])
        return Counter(sample for samples in taken.values() for sample in samples)


def _weighted(line: Mapping[str, Any]) -> list[tuple[float, float]]:
    """Return the losses of one rank's passes, each with its weight, else the samples that it is the mean of."""
    losses, counts = line["losses"], line.get("weights") or line["counts"]
    # A pipeline has a loss per micro-batch, all of one size, and not per batch.
    return list(zip(losses, counts if len(counts) == len(losses) else [1] * len(losses), strict=True))


def read_trace(name: str, log: Path) -> Trace | None:
    """Read the trace in a run's log folder, also of a failed run; None if a rank has none."""
    with suppress(OSError, ValueError, KeyError, IndexError):
        facts = json.loads((log / FACTS).read_text())
        ranks = [_read_rank(log / FOLDER / f"rank-{rank}") for rank in range(facts["world_size"])]
        options = SCRIPT_OPTIONS | facts.get("options", {})
        if all(ranks):
            return Trace(name, facts, options, ranks, is_script="options" not in facts)
    return None


def _read_rank(folder: Path) -> dict[Moment, Snapshot]:
    moments = {}
    for text in folder.with_suffix(".jsonl").read_text().splitlines():
        with suppress(ValueError, KeyError):  # the last line of a killed run
            line = json.loads(text)
            when = Moment(int(line["step"]), EVENTS.index(line["event"]))
            tensors = folder / f"{when.name}-{when.step}.safetensors"
            moments[when] = Snapshot(line, partial(_read_tensors, tensors))
    return moments


@lru_cache(maxsize=8)  # and not all, which may be gigabytes
def _read_tensors(file: Path) -> Mapping[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(file)
