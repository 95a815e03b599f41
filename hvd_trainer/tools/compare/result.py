"""The results of a comparison: medians of each trial, ratios of pairs, and what makes the difference."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from statistics import median
from typing import Any

from hvd_trainer.measure.formats import milliseconds, more_or_less
from hvd_trainer.measure.stats import Ratio, ratios
from hvd_trainer.tools.compare.prediction import Prediction, Shape, explain, predict
from hvd_trainer.tools.compare.trials import ENTRIES, RANKS, Trial
from hvd_trainer.tools.compare.variants import Axis
from hvd_trainer.tools.runner.equal_work import Side
from hvd_trainer.tools.runner.records import RunRecord
from hvd_trainer.tools.runner.step_stats import RANKS_DIFFER
from hvd_trainer.utils.text import plural

PART_TEXTS = {
    "data_s": "fetching data",
    "forward_s": "forward",
    "backward_s": "backward",
    "exchange_s": "exchanging gradients",
    "straggler_s": "waiting for the slowest rank",
    "update_s": "the optimizer's update",
    "other_s": "the rest",
}
"""The parts of a step, by the names of their figures."""
FIRST = ("train_loss", "last_loss", "test_loss", "test_accuracy")
"""Figures of which the first round's is shown: between two runs there is no loss that a training has had."""
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

    @cached_property
    def rounds(self) -> dict[int, dict[str, Any]]:
        """The figures of each run by round, the parts of a step and the start-up among them."""
        found = {}
        for number, run in self.runs.items():
            parts = {f"{name}_s": seconds for name, seconds in run.figures.get("parts", {}).items()}
            # The part called step is the update; step_s is the whole step.
            found[number] = {**parts, "update_s": parts.get("step_s"), "step_s": None, **run.figures}
            if "first_step_at" in run.figures:
                # From the launcher's start to the end of the slowest rank's first step.
                found[number]["startup_s"] = run.figures["first_step_at"] - run.began_at
        return found

    def by_round(self, name: str) -> dict[int, float]:
        """Return a figure of each run that has it."""
        return {number: its[name] for number, its in self.rounds.items() if its.get(name) is not None}

    def median(self, name: str) -> float | None:
        """Return the median of a figure over the rounds, or of a `FIRST` one that of the first round."""
        values = list(self.by_round(name).values())
        return None if not values else values[0] if name in FIRST else median(values)

    @property
    def weights(self) -> str | None:
        """The checksum of the final weights, if all runs ended with the same; else `differ`."""
        found = {run.figures.get("weights") for run in self.runs.values()}
        return None if not found - {None} else found.pop() if len(found) == 1 else "differ"

    @property
    def global_batch_size(self) -> int | None:
        return next((run.figures["work"].get("global_batch_size") for run in self.runs.values()), None)


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
        rounds = plural(speed.rounds, "round")
        if speed.low is None:
            said = f"{one} has {speed.value:.2f} times the speed of {other} in {rounds}"
            return f"{where} {said}, which is too few to tell a difference from noise."
        if speed.is_clear and speed.value < 1:
            one, other, speed = other, one, speed.inverse
        interval = f"(mean of {rounds}, {speed.interval})"
        if speed.is_clear:
            return f"{where} {one} is {speed.value:.2f} times as fast as {other} {interval}."
        said = f"no difference between {one} and {other} is visible at this noise"
        return f"{where} {said}: {speed.value:.2f} times {interval}."

    def why(self) -> str | None:
        """Say which parts of a step make the difference; None where there is none, or no part was measured."""
        if not self.speed.is_clear:
            return None
        slow, fast = (self.other, self.one) if self.speed.value > 1 else (self.one, self.other)
        parts = {name: (slow.median(name), fast.median(name)) for name in PART_TEXTS}
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
            one, other = self.one.median(name), self.other.median(name)
            if one is not None and other is not None:
                return f"Their weights differ; the final training losses are {one:.6f} and {other:.6f}."
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
        values = [its.trial.values for its in self.results]
        own = [Axis(name, tuple(dict.fromkeys(its[name] for its in values))) for name in (ENTRIES, RANKS)]
        return [*own, *self.varied]

    @cached_property
    def figures(self) -> dict[str, dict[str, Any]]:
        """All figures by the keys of trials, and by their names in comparison.csv; None: not measured."""
        return {its.trial.key: self._figures_of(its) for its in self.results}

    def _figures_of(self, its: TrialResult) -> dict[str, Any]:
        rate, step_s, speed_up = its.median("samples_per_s"), its.median("step_s"), self.speed_up(its)
        rates = its.by_round("samples_per_s").values()
        off, prediction = self.deviation(its), self.predictions.get(its.trial.key)
        shape = Shape.of(its.trial) if its.runs else None
        return {
            "samples_per_s": rate,
            # Of a script whose samples are not seen.
            "steps_per_s": 1 / step_s if step_s is not None and rate is None else None,
            "lowest": min(rates, default=None),
            "highest": max(rates, default=None),
            "tokens_per_s": its.median("tokens_per_s"),
            "per_rank": None if rate is None else rate / its.trial.ranks,
            "speed_up": speed_up,
            "efficiency": None if speed_up is None else speed_up / its.trial.ranks,
            **{name: its.median(name) for name in ("step_s", "step_p50_s", "step_p95_s", *PART_TEXTS)},
            "predicted_step_s": None if off is None or prediction is None else prediction.step_s,
            "off": off,
            "bubble": its.median("bubble"),
            "bubble_formula": None if shape is None else shape.bubble,
            **{name: its.median(name) for name in ("startup_s", "peak_memory_mb", "base_memory_mb", *FIRST)},
            "loss_to_first": self.loss_to_first(its),
            "weights": its.weights,
        }

    def speed_up(self, its: TrialResult) -> float | None:
        """Return the speed as a multiple of that of the same entry and variant on one rank."""
        bases = (o for o in self.results if o.trial.ranks == 1 and o.trial.series == its.trial.series)
        rounds = [pair for base in bases for pair in _common_rounds(its, base)]
        return median(one / other for one, other in rounds) if rounds else None

    def loss_to_first(self, its: TrialResult) -> float | None:
        """Return the relative difference of the training loss from the first trial's with the same global batch.

        None without `--vary`. Steps of another size make another training, whose loss is not comparable.
        """
        loss = its.median("train_loss")
        if loss is None or not self.varied:
            return None
        alike = (other for other in self.results if other.global_batch_size == its.global_batch_size)
        first = next(value for other in alike if (value := other.median("train_loss")) is not None)
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
                found.append((one, other, rounds))
        speeds = ratios([tuple(zip(*rounds, strict=True)) for _, _, rounds in found])
        return [Pair(one, other, speed) for (one, other, _), speed in zip(found, speeds, strict=True)]

    def verdicts(self) -> list[str]:
        """Return a text for each pair."""
        return [" ".join(filter(None, (pair.verdict(), pair.why(), pair.same_model()))) for pair in self.pairs]

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

    @cached_property
    def predictions(self) -> dict[str, Prediction]:
        """The step times that the formula of the pipeline predicts, by the keys of trials."""
        measured = {its.trial.key: step_s for its in self.results if (step_s := its.median("step_s")) is not None}
        return predict([its.trial for its in self.results], measured)

    def deviation(self, its: TrialResult) -> float | None:
        """Return by which fraction a step takes longer than predicted."""
        step_s, prediction = its.median("step_s"), self.predictions.get(its.trial.key)
        return None if step_s is None or prediction is None else step_s / prediction.step_s - 1

    def deviations(self) -> list[str]:
        """Return lines about the trials whose steps take another time than predicted, the farthest off first."""
        found = [(off, its) for its in self.results if (off := self.deviation(its)) is not None]
        if not found:
            return []
        far = [(off, its) for off, its in found if abs(off) > MAX_DEVIATION]
        text = f"Measured and predicted step times differ by more than {MAX_DEVIATION:.0%} in"
        lines = [f"{text} {len(far)} of {len(found)}{':' if far else '.'}"]
        cores = None if "gpus" in self.machine else self.machine.get("cores", os.cpu_count())
        for off, its in sorted(far, key=lambda pair: -abs(pair[0])):
            prediction = self.predictions[its.trial.key]
            lines.append(
                f"  {its.trial.label}: {milliseconds(its.median('step_s') or 0)} ms, predicted "
                f"{milliseconds(prediction.step_s)} ms ({more_or_less(off)}) from {prediction.base.label}"
            )
            reasons = explain(its.trial, prediction.base, off, its.median("bubble"), cores)
            lines += [f"    {reason}" for reason in reasons]
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
