"""The results of a comparison: medians of each trial, ratios of pairs, and what makes the difference."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from statistics import median
from typing import Any

from hvd_trainer.tools.compare.equal_work import Side, refuse_unequal
from hvd_trainer.tools.compare.prediction import Prediction, Shape, explain, predict
from hvd_trainer.tools.compare.trials import Trial, axes_of
from hvd_trainer.tools.compare.variants import Axis
from hvd_trainer.tools.runner.formats import milliseconds, more_or_less
from hvd_trainer.tools.runner.ratio import Ratio, ratio
from hvd_trainer.tools.runner.runs import RunRecord
from hvd_trainer.tools.runner.step_stats import RANKS_DIFFER, STEP_PARTS
from hvd_trainer.utils.text import plural

PART_TEXTS = {
    "data": "fetching data",
    "forward": "forward",
    "backward": "backward",
    "exchange": "exchanging gradients",
    "straggler": "waiting for the slowest rank",
    "step": "the optimizer's update",
    "other": "the rest",
}
MIN_SHARE = 0.15
"""A part of a step is named if it makes at least this share of a difference."""
MAX_DEVIATION = 0.1
"""Relative difference of a measured step from the predicted one, from which it is reported."""


@dataclass(frozen=True)
class TrialResult:
    """A trial, and its runs that came to their end, by round."""

    trial: Trial
    runs: Mapping[int, RunRecord]
    state: str
    """done, failed, killed, impossible, or not run"""
    note: str = ""
    """why it cannot be, or what became of the latest run that failed, unless its round went well later"""

    @classmethod
    def of(cls, trial: Trial, runs: Sequence[RunRecord]) -> TrialResult:
        """Collect the runs of a trial from all runs in a folder; the last one of each round counts."""
        if trial.reason is not None:
            return cls(trial, {}, "impossible", trial.reason)
        last = {run.round: run for run in runs if run.key == trial.key}
        done = {number: run for number, run in sorted(last.items()) if run.state == "done"}
        bad = [run for run in last.values() if run.state != "done"]
        if not last:
            return cls(trial, {}, "not run", "not run")
        note = f"{bad[-1].state} in round {bad[-1].round}: {bad[-1].note}" if bad else ""
        return cls(trial, done, "done" if done else bad[-1].state, note)

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to measure."""
        return self.state == "impossible" or (self.state == "done" and not self.note)

    def by_round(self, name: str) -> dict[int, float]:
        """Return a figure of each run that has it."""
        return {
            number: run.figures[name] for number, run in self.runs.items() if run.figures.get(name) is not None
        }

    def median(self, name: str) -> float | None:
        values = self.by_round(name).values()
        return median(values) if values else None

    def first(self, name: str) -> float | None:
        """Return a figure of the first run: between two runs there is no loss that a training has had."""
        return next(iter(self.by_round(name).values()), None)

    def part(self, name: str) -> float | None:
        """Return the median seconds of one part of a step."""
        parts = [run.figures.get("parts", {}) for run in self.runs.values()]
        values = [its[name] for its in parts if name in its]
        return median(values) if values else None

    @property
    def startup_s(self) -> float | None:
        """From the launcher's start to the end of the slowest rank's first step."""
        values = [run.figures["first_step_at"] - run.began_at for run in self.runs.values()]
        return median(values) if values else None

    @property
    def weights(self) -> str | None:
        """The checksum of the final weights, if all runs ended with the same; else `differ`."""
        found = {run.figures.get("weights") for run in self.runs.values()}
        return None if not found - {None} else found.pop() if len(found) == 1 else "differ"

    @property
    def global_batch_size(self) -> int | None:
        sizes = (run.figures["work"].get("global_batch_size") for run in self.runs.values())
        return next(sizes, None)


@dataclass(frozen=True)
class Pair:
    """Two entries with the same variant on as many ranks: the speed of one as a multiple of the other's."""

    one: TrialResult
    other: TrialResult
    speed: Ratio

    def verdict(self) -> str:
        """Say in one sentence which one is faster."""
        one, other, speed = self.one.trial.entry.name, self.other.trial.entry.name, self.speed
        variant = self.one.trial.variant.label
        where = f"On {plural(self.one.trial.ranks, 'rank')}{f' with {variant},' if variant else ''}"
        value, low, high, rounds = speed.value, speed.low, speed.high, plural(speed.rounds, "round")
        if low is None or high is None:
            said = f"{one} has {value:.2f} times the speed of {other} in {rounds}"
            return f"{where} {said}, which is too few to tell a difference from noise."
        if speed.is_clear and value < 1:
            one, other, value, low, high = other, one, 1 / value, 1 / high, 1 / low
        interval = f"(median ratio of {rounds}, 95 % interval {low:.2f} to {high:.2f})"
        if speed.is_clear:
            return f"{where} {one} is {value:.2f} times as fast as {other} {interval}."
        said = f"no difference between {one} and {other} is visible at this noise"
        return f"{where} {said}: {value:.2f} times {interval}."

    def why(self) -> str | None:
        """Say which parts of a step make the difference; None where there is none, or no part was measured."""
        if not self.speed.is_clear:
            return None
        slow, fast = (self.other, self.one) if self.speed.value > 1 else (self.one, self.other)
        parts = {name: (slow.part(name), fast.part(name)) for name in STEP_PARTS}
        more = {name: a - b for name, (a, b) in parts.items() if a is not None and b is not None}
        total = sum(more.values())
        if not more or total <= 0:
            return None
        named = sorted((n for n in more if abs(more[n]) >= MIN_SHARE * total), key=more.__getitem__, reverse=True)
        parts_text = ", ".join(f"{PART_TEXTS[name]} {1000 * more[name]:+.2f} ms" for name in named)
        return f"A step of {slow.trial.entry.name} takes {1000 * total:.2f} ms longer: {parts_text}."

    def same_model(self) -> str | None:
        """Say whether both have trained the same weights; None where they were not kept."""
        left, right = self.one.weights, self.other.weights
        if left is None or right is None:
            return None
        if left == right and left not in ("differ", RANKS_DIFFER):
            return "Both have trained the same weights, to the last bit."
        for name in ("train_loss", "last_loss"):
            losses = [its for one in (self.one, self.other) if (its := one.first(name)) is not None]
            if len(losses) == 2:
                return f"Their weights differ; the final training losses are {losses[0]:.6f} and {losses[1]:.6f}."
        return "Their weights differ."


@dataclass(frozen=True)
class Comparison:
    """All that was measured."""

    job: tuple[str, ...]
    strong: bool
    """whether the global batch is the same on any number of ranks"""
    machine: Mapping[str, Any]
    varied: Sequence[Axis]
    """the axes of `--vary`"""
    results: Sequence[TrialResult]

    @classmethod
    def of(
        cls,
        trials: Sequence[Trial],
        runs: Sequence[RunRecord],
        *,
        job: tuple[str, ...],
        strong: bool,
        machine: Mapping[str, Any],
        varied: Sequence[Axis] = (),
    ) -> Comparison:
        """Collect the results of the trials from all runs in a folder."""
        results = [TrialResult.of(trial, runs) for trial in trials]
        return cls(job, strong, machine, varied, [_with_samples(its, results) for its in results])

    @property
    def axes(self) -> list[Axis]:
        """Engines, ranks, and the axes of `--vary`."""
        return axes_of([its.trial for its in self.results], self.varied)

    def check_work(self) -> None:
        """Check that all runs of a variant have done the same work.

        Raises:
            OptionError: two have not.
        """
        sides = [side_of(its.trial, run) for its in self.results for run in its.runs.values()]
        for one, other in combinations(sides, 2):
            refuse_unequal(one, other, self.strong)

    def speed_up(self, its: TrialResult) -> float | None:
        """Return the speed as a multiple of that of the same entry and variant on one rank."""
        place = (1, its.trial.entry, its.trial.variant)
        bases = (o for o in self.results if (o.trial.ranks, o.trial.entry, o.trial.variant) == place)
        rounds = [pair for base in bases for pair in _common_rounds(its, base)]
        return median(one / other for one, other in rounds) if rounds else None

    def efficiency(self, its: TrialResult) -> float | None:
        """Return the speed-up by the number of ranks."""
        speed_up = self.speed_up(its)
        return None if speed_up is None else speed_up / its.trial.ranks

    def loss_to_first(self, its: TrialResult) -> float | None:
        """Return the relative difference of the training loss from the first trial's with the same global batch.

        None without `--vary`. Steps of another size make another training, whose loss is not comparable.
        """
        loss = its.first("train_loss")
        if loss is None or not self.varied:
            return None
        alike = (other for other in self.results if other.global_batch_size == its.global_batch_size)
        first = next(value for other in alike if (value := other.first("train_loss")) is not None)
        return loss / first - 1 if loss != first else 0.0

    @cached_property
    def pairs(self) -> list[Pair]:
        """The engines among each other, and each other script beside the engine that it uses."""
        found = []
        for one, other in combinations(self.results, 2):
            first, second = one.trial.entry, other.trial.entry
            both_ours = first.is_job and second.is_job
            same_place = (one.trial.ranks, one.trial.variant) == (other.trial.ranks, other.trial.variant)
            if first == second or not same_place or not (both_ours or first.engine == second.engine):
                continue
            if rounds := _common_rounds(one, other):
                found.append(Pair(one, other, ratio(*zip(*rounds, strict=True))))
        return found

    @property
    def unseen(self) -> list[str]:
        """A sentence for each thing that cannot be seen of a script."""
        runs = [run for its in self.results for run in its.runs.values() if "world_size" in run.figures["work"]]
        found = []
        if any("exchange" not in run.figures.get("parts", {}) for run in runs):
            found.append(
                "The exchange is not seen apart: DistributedDataParallel waits for it in the backward pass."
            )
        if any("samples" not in run.figures["work"] for run in runs):
            found.append("A script fetches its batches without a DataLoader: its samples are not seen.")
        if any(run.figures.get("weights") == RANKS_DIFFER for run in runs):
            found.append("The final weights of a script differ between its ranks: it may not exchange gradients.")
        return found

    def verdicts(self) -> list[str]:
        """Return a text for each pair."""
        return [" ".join(filter(None, (pair.verdict(), pair.why(), pair.same_model()))) for pair in self.pairs]

    @cached_property
    def predictions(self) -> dict[str, Prediction]:
        """The step times that the formula of the pipeline predicts, by the keys of trials."""
        measured = {its.trial.key: step_s for its in self.results if (step_s := its.median("step_s")) is not None}
        return predict([its.trial for its in self.results], measured)

    def deviation(self, its: TrialResult) -> float | None:
        """Return by which fraction a step takes longer than predicted."""
        step_s, prediction = its.median("step_s"), self.predictions.get(its.trial.key)
        return None if step_s is None or prediction is None else step_s / prediction.step_s - 1

    def bubble_formula(self, its: TrialResult) -> float | None:
        """Return the fraction of a step that stages wait by the formula, of a trial that was measured."""
        shape = Shape.of(its.trial) if its.runs else None
        return None if shape is None else shape.bubble

    def deviations(self) -> list[str]:
        """Return lines about the trials whose steps take another time than predicted, the farthest off first."""
        off = {its.trial.key: value for its in self.results if (value := self.deviation(its)) is not None}
        if not off:
            return []
        far = [its for its in self.results if abs(off.get(its.trial.key, 0.0)) > MAX_DEVIATION]
        text = f"Measured and predicted step times differ by more than {MAX_DEVIATION:.0%} in"
        lines = [f"{text} {len(far)} of {len(off)}{':' if far else '.'}"]
        cores = None if "gpus" in self.machine else self.machine.get("cores", os.cpu_count())
        for its in sorted(far, key=lambda its: -abs(off[its.trial.key])):
            prediction, deviation = self.predictions[its.trial.key], off[its.trial.key]
            lines.append(
                f"  {its.trial.label}: {milliseconds(its.median('step_s') or 0)} ms, predicted "
                f"{milliseconds(prediction.step_s)} ms ({more_or_less(deviation)}) from {prediction.base.label}"
            )
            bubble = its.median("bubble")
            figures = {"off": deviation} | ({} if bubble is None else {"bubble": bubble})
            lines += [f"    {reason}" for reason in explain(its.trial, prediction.base, figures, cores)]
        return lines


def side_of(trial: Trial, run: RunRecord) -> Side:
    """Return a run as the check of equal work sees it."""
    return Side(trial.entry.name, trial.ranks, run.figures["work"], trial.variant.label)


def _with_samples(its: TrialResult, results: Sequence[TrialResult]) -> TrialResult:
    """Give a script its samples per second: a step has as many samples as one of the job on as many ranks."""
    if its.trial.entry.is_job:
        return its
    ours = (other for other in results if other.trial.entry.is_job and other.trial.ranks == its.trial.ranks)
    sizes = [o.by_round("samples_per_s")[n] * o.by_round("step_s")[n] for o in ours for n in o.by_round("step_s")]
    if not sizes:
        return its
    runs = {
        number: replace(run, figures={**run.figures, "samples_per_s": sizes[0] / run.figures["step_s"]})
        for number, run in its.runs.items()
    }
    return replace(its, runs=runs)


def _common_rounds(one: TrialResult, other: TrialResult) -> list[tuple[float, float]]:
    """Return the two speeds of each round that both have, in samples, or where these are not seen in steps."""
    ones, others = one.by_round("samples_per_s"), other.by_round("samples_per_s")
    if not ones or not others:
        ones, others = ({n: 1 / step_s for n, step_s in its.by_round("step_s").items()} for its in (one, other))
    return [(ones[number], others[number]) for number in ones if number in others]
