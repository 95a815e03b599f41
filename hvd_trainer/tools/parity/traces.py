"""Reading what a job has computed, step by step, on all of its ranks (`step_trace.py`)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from torch import Tensor

from hvd_trainer.observe.run_folder import FACTS
from hvd_trainer.observe.step_trace import FOLDER

EVENTS = ("start", "step", "evaluation")
"""In the order in which those of one step come."""


class When(NamedTuple):
    """A moment of a training."""

    step: int
    event: int
    """its number in `EVENTS`"""

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> When:
        return cls(int(line["step"]), EVENTS.index(line["event"]))

    @property
    def name(self) -> str:
        return EVENTS[self.event]

    def __str__(self) -> str:
        words = {"start": "before the first step", "step": f"in step {self.step}"}
        return words.get(self.name, f"in the evaluation after step {self.step}")


@dataclass(frozen=True)
class Moment:
    """What one rank had at one moment."""

    line: Mapping[str, Any]
    values: Callable[[], Mapping[str, Tensor]]
    """reads the tensors, flat, by kind and name: `gradients/fc1.weight`"""

    def checksums(self, kind: str) -> Mapping[str, str]:
        """Of gradients, parameters, optimizer or buffers, by name."""
        found: Mapping[str, str] = self.line["checksums"].get(kind, {})
        return found


@dataclass(frozen=True)
class Trace:
    """What all ranks of one run had, moment by moment."""

    name: str
    """of the engine"""
    facts: Mapping[str, Any]
    """as run.json has them"""
    options: Mapping[str, Any]
    """of the job, by their flat names"""
    ranks: Sequence[Mapping[When, Moment]]

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def start(self) -> Mapping[str, Any]:
        """What rank 0 told of itself and the model."""
        return self.ranks[0][min(self.ranks[0])].line

    @property
    def moments(self) -> list[When]:
        """Those that all ranks have."""
        return sorted(set.intersection(*(set(rank) for rank in self.ranks)))

    @property
    def steps(self) -> list[When]:
        return [when for when in self.moments if when.name == "step"]

    def lines(self, when: When) -> list[Mapping[str, Any]]:
        """One of each rank."""
        return [rank[when].line for rank in self.ranks]

    def loss(self, when: When) -> float:
        """The mean over the samples of all ranks; not a number where no rank has a loss."""
        pairs = [pair for line in self.lines(when) for pair in _weighted(line)]
        weight = sum(count for _, count in pairs)
        return sum(loss * count for loss, count in pairs) / weight if weight else float("nan")

    def grad_norm(self, when: When) -> float | None:
        """As rank 0 has it."""
        norm: float | None = self.lines(when)[0]["grad_norm"]
        return norm

    def samples(self, when: When) -> Counter[str]:
        """How often each sample was taken by all together: stages of one copy of the model take the same ones."""
        taken: dict[int, list[str]] = {}
        for rank, line in zip(self.ranks, self.lines(when), strict=True):
            taken.setdefault(rank[min(rank)].line["copy"], line["samples"])
        return Counter(sample for samples in taken.values() for sample in samples)


def _weighted(line: Mapping[str, Any]) -> list[tuple[float, int]]:
    """The losses of one rank's passes, and of how many samples each is the mean."""
    losses, counts = line["losses"], line["counts"]
    # A pipeline's chunks are not the batches; they are alike.
    return list(zip(losses, counts if len(counts) == len(losses) else [1] * len(losses), strict=True))


def read_trace(name: str, log: Path) -> Trace | None:
    """What a run has kept in its log folder, also if it has failed; None if a rank has kept nothing."""
    with suppress(OSError, ValueError, KeyError, IndexError):
        size = json.loads((log / FACTS).read_text())["world_size"]
        ranks = [_read_rank(log / FOLDER / f"rank-{rank}") for rank in range(size)]
        options = yaml.safe_load((log / "config.yaml").read_text())
        if all(ranks):
            return Trace(name, json.loads((log / FACTS).read_text()), options, ranks)
    return None


def _read_rank(folder: Path) -> dict[When, Moment]:
    moments = {}
    for text in folder.with_suffix(".jsonl").read_text().splitlines():
        with suppress(ValueError, KeyError):  # the last line of a killed run
            line = json.loads(text)
            moments[When.of(line)] = Moment(
                line, partial(_values, folder / f"{line['event']}-{line['step']}.safetensors")
            )
    return moments


def _values(file: Path) -> Mapping[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(file)
