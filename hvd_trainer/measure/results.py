"""The result of a trial: its runs by round, medians of their figures, and pairs with those of another trial."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Any, Generic, TypeVar

from hvd_trainer.measure.trials import RunRecord, Trial, key_of

T = TypeVar("T", bound=Trial)
FIRST = ("train_loss", "last_loss", "val_loss", "val_accuracy")
"""Figures of which the first round's is shown: between two runs there is no loss that a training has had."""


@dataclass(frozen=True)
class TrialResult(Generic[T]):
    """A trial, and its runs that came to their end, by round."""

    trial: T
    runs: Mapping[int, RunRecord]
    state: str
    """done, failed, killed, or not run"""
    note: str = ""
    """how the latest run failed, unless its round went well later"""
    output: str = ""
    """the file with what that run printed"""

    @classmethod
    def collect(cls, trials: Sequence[T], runs: Sequence[RunRecord]) -> list[TrialResult[T]]:
        """Return the result of each trial, of all runs in a folder; the last one of each round counts."""
        by_key: dict[str, dict[int, RunRecord]] = {}
        for run in runs:
            by_key.setdefault(run.key, {})[run.round] = run
        return [cls._of(trial, by_key.get(key_of(trial.identity), {})) for trial in trials]

    @classmethod
    def _of(cls, trial: T, last: Mapping[int, RunRecord]) -> TrialResult[T]:
        done = {number: run for number, run in sorted(last.items()) if run.state == "done"}
        bad = [run for run in last.values() if run.state != "done"]
        if not last:
            return cls(trial, {}, "not run", "not run")
        if not bad:
            return cls(trial, done, "done")
        note = f"{bad[-1].state} in round {bad[-1].round}: {bad[-1].note}"
        return cls(trial, done, "done" if done else bad[-1].state, note, bad[-1].output)

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to measure."""
        return self.state == "done" and not self.note

    @cached_property
    def rounds(self) -> dict[int, dict[str, Any]]:
        """The figures of each run by round, the parts of a step and the start-up among them."""
        rounds = {}
        for number, run in self.runs.items():
            parts = {f"{name}_s": seconds for name, seconds in run.figures.get("parts", {}).items()}
            rounds[number] = {**parts, **run.figures}
            if "first_step_at" in run.figures:
                # From the launcher's start to the end of the slowest rank's first step.
                rounds[number]["startup_s"] = run.figures["first_step_at"] - run.began_at
        return rounds

    def by_round(self, name: str) -> dict[int, float]:
        """Return a figure of each run that has it."""
        return {number: figures[name] for number, figures in self.rounds.items() if figures.get(name) is not None}

    def median(self, name: str) -> float | None:
        """Return the median of a figure over the rounds, or of a `FIRST` one that of the first round."""
        if name in FIRST:
            first: float | None = self.rounds[min(self.rounds)].get(name) if self.rounds else None
            return first
        values = list(self.by_round(name).values())
        return median(values) if values else None

    def in_turn(self, other: TrialResult[T], name: str) -> list[tuple[float, float]]:
        """Return a figure of both trials, of each round that both ran in one go.

        Runs of different goes have hours between them, and perhaps other programs beside them.
        """
        ones, others = self.by_round(name), other.by_round(name)
        together = (n for n in ones if n in others and self.runs[n].go == other.runs[n].go)
        return [(ones[number], others[number]) for number in together]

    def speeds_in_turn(self, other: TrialResult[T]) -> list[tuple[float, float]]:
        """Return the two speeds of each such round: samples per second, or steps where a script's are not seen."""
        if self.by_round("samples_per_s") and other.by_round("samples_per_s"):
            return self.in_turn(other, "samples_per_s")
        return [(1 / own, 1 / others) for own, others in self.in_turn(other, "step_s")]

    @property
    def weights(self) -> str | None:
        """The checksum of the final weights, if all runs ended with the same; else `differ`."""
        checksums = {run.figures.get("weights") for run in self.runs.values()}
        return None if not checksums - {None} else checksums.pop() if len(checksums) == 1 else "differ"

    @property
    def global_batch_size(self) -> int | None:
        return next((run.figures["work"].get("global_batch_size") for run in self.runs.values()), None)
