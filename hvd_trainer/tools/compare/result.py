"""The results of a comparison: medians of each trial, ratios of pairs, and what makes the difference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from typing import Any, Literal

from hvd_trainer.measure.equal_work import Side
from hvd_trainer.measure.figures import RANKS_DIFFER
from hvd_trainer.measure.machine import Ran
from hvd_trainer.measure.report import Verdict
from hvd_trainer.measure.results import FIRST, TrialResult
from hvd_trainer.measure.stats import Ratio, ratio, ratios
from hvd_trainer.measure.trials import RunRecord
from hvd_trainer.tools.compare.trials import ENTRIES, RANKS, CompareTrial
from hvd_trainer.tools.compare.variants import Axis
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
MIN_SHARE = 0.15
"""A part of a step is named if it makes at least this share of a difference."""
Result = TrialResult[CompareTrial]


@dataclass(frozen=True)
class Pair:
    """Two entries with the same variant on as many ranks: the speed of one as a multiple of the other's."""

    one: Result
    other: Result
    speed: Ratio

    def verdict(self) -> Verdict:
        """Say which one is faster, and why."""
        one, other, speed = self.one.trial.entry.name, self.other.trial.entry.name, self.speed
        rounds, sides = plural(speed.rounds, "round"), (f"{other} is faster", f"{one} is faster")
        details = [text for text in (self.why(), self.same_model()) if text]
        if speed.low is None:
            said = f"{one} has {speed.value:.2f} times the speed of {other} in {rounds}"
            text = f"{self.where} {said}, which is too few to tell a difference from noise."
            return Verdict(text, "unsure", details, badge=speed.badge, ratio=speed, sides=sides)
        if speed.is_clear and speed.value < 1:
            one, other, speed, sides = other, one, speed.inverse, sides[::-1]
        interval = f"(mean of {rounds}, {speed.interval})"
        if speed.is_clear:
            text = f"{self.where} {one} is {speed.value:.2f} times as fast as {other} {interval}."
            return Verdict(text, "sure", details, badge=speed.badge, ratio=speed, sides=sides)
        said = f"no difference between {one} and {other} is visible at this noise"
        text = f"{self.where} {said}: {speed.value:.2f} times {interval}."
        return Verdict(text, "unsure", details, badge=speed.badge, ratio=speed, sides=sides)

    @property
    def where(self) -> str:
        """`On 2 ranks with chunks 4,`: the place that both have in common."""
        variant = self.one.trial.variant.label
        return f"On {plural(self.one.trial.ranks, 'rank')}{f' with {variant},' if variant else ''}"

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


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All that was measured."""

    job: tuple[str, ...]
    machine: Mapping[str, Any]
    ran: Ran
    varied: Sequence[Axis] = ()
    """the axes of `--vary`"""
    results: Sequence[Result]
    options: Sequence[str] = ()
    """of the command, as they were typed"""
    warnings: Sequence[str] = ()
    """what the commands warned of that made the runs"""

    @classmethod
    def of(cls, trials: Sequence[CompareTrial], runs: Sequence[RunRecord], **known: Any) -> Comparison:
        """Collect the results of the trials from all runs in a folder.

        Args:
            known: the other fields of a comparison.
        """
        results = TrialResult.collect(trials, runs)
        warnings = (text for result in results for run in result.runs.values() for text in run.warnings)
        results = [_with_samples(result, results) for result in results]
        return cls(results=results, warnings=list(dict.fromkeys(warnings)), **known)

    @property
    def axes(self) -> list[Axis]:
        """Engines, ranks, and the axes of `--vary`."""
        values = [result.trial.values for result in self.results]
        own = [Axis(name, tuple(dict.fromkeys(place[name] for place in values))) for name in (ENTRIES, RANKS)]
        return [*own, *self.varied]

    @cached_property
    def figures(self) -> dict[str, dict[str, Any]]:
        """All figures by the keys of trials and by name; None: not measured."""
        return {result.trial.key: self._figures_of(result) for result in self.results}

    def _figures_of(self, result: Result) -> dict[str, Any]:
        rate, step_s, speed_up = result.median("samples_per_s"), result.median("step_s"), self.speed_up(result)
        rates = result.by_round("samples_per_s").values()
        return {
            "samples_per_s": rate,
            # Of a script whose samples are not seen.
            "steps_per_s": 1 / step_s if step_s is not None and rate is None else None,
            "lowest": min(rates, default=None),
            "highest": max(rates, default=None),
            "tokens_per_s": result.median("tokens_per_s"),
            "per_rank": None if rate is None else rate / result.trial.ranks,
            "speed_up": speed_up,
            "efficiency": None if speed_up is None else speed_up / result.trial.ranks,
            **{
                name: result.median(name) for name in ("step_s", "step_p50_s", "step_p95_s", *PART_TEXTS, "bubble")
            },
            **{name: result.median(name) for name in ("startup_s", "peak_memory_mb", *FIRST)},
            "loss_to_first": self.loss_to_first(result),
            "weights": result.weights,
        }

    def speed_up(self, result: Result) -> float | None:
        """Return the speed as a multiple of that of the same entry and variant on one rank."""
        bases = (o for o in self.results if o.trial.ranks == 1 and o.trial.series == result.trial.series)
        rounds = [pair for base in bases for pair in _common_rounds(result, base)]
        return ratio(*zip(*rounds, strict=True)).value if rounds else None

    def loss_to_first(self, result: Result) -> float | None:
        """Return the relative difference of the training loss from the first trial's with the same global batch.

        None without `--vary`. Steps of another size make another training, whose loss is not comparable.
        """
        loss = result.median("train_loss")
        if loss is None or not self.varied:
            return None
        alike = (other for other in self.results if other.global_batch_size == result.global_batch_size)
        first = next(value for other in alike if (value := other.median("train_loss")) is not None)
        return loss / first - 1 if loss != first else 0.0

    @cached_property
    def neighbours(self) -> list[tuple[Result, Result]]:
        """The engines among each other, and each other script beside the engine that it uses; both have runs."""
        pairs = []
        for one, other in combinations(self.results, 2):
            first, second = one.trial.entry, other.trial.entry
            comparable = first != second and ((first.is_job and second.is_job) or first.engine == second.engine)
            same_place = (one.trial.ranks, one.trial.variant) == (other.trial.ranks, other.trial.variant)
            if comparable and same_place and one.runs and other.runs:
                pairs.append((one, other))
        return pairs

    @cached_property
    def pairs(self) -> list[Pair]:
        """The neighbours that have run in turn, with the ratio of their speeds, corrected for their number."""
        rounds = [(one, other, _common_rounds(one, other)) for one, other in self.neighbours]
        known = [(one, other, common) for one, other, common in rounds if common]
        speeds = ratios([([a for a, _ in common], [b for _, b in common]) for _, _, common in known])
        return [Pair(one, other, speed) for (one, other, _), speed in zip(known, speeds, strict=True)]

    @property
    def apart(self) -> list[str]:
        """A sentence for each pair of neighbours that have not run in turn."""
        return [
            f"{one.trial.label} and {other.trial.label} have run at different times, and in no round in turn: "
            f"nothing is said of which one is faster"
            for one, other in self.neighbours
            if not _common_rounds(one, other)
        ]

    @cached_property
    def batches(self) -> dict[str, dict[int, int]]:
        """The global batch by number of ranks, of each entry with a variant, as far as it is known."""
        sizes: dict[str, dict[int, int]] = {}
        for result in self.results:
            if result.global_batch_size is not None:
                sizes.setdefault(result.trial.series, {})[result.trial.ranks] = result.global_batch_size
        return sizes

    @property
    def scaling(self) -> Literal["strong", "weak"] | None:
        """Strong: the global batch was the same on any number of ranks; weak: each rank's was; None: neither."""
        series = [sizes for sizes in self.batches.values() if len(sizes) > 1]
        if series and all(len({*sizes.values()}) == 1 for sizes in series):
            return "strong"
        if series and all(len({size / ranks for ranks, size in sizes.items()}) == 1 for sizes in series):
            return "weak"
        return None

    @property
    def unseen(self) -> list[str]:
        """A sentence for each thing that cannot be seen of a script."""
        runs = [run for result in self.results for run in result.runs.values()]
        runs = [run for run in runs if not run.figures["work"].get("on_trainer")]
        texts = []
        if any("exchange" not in run.figures.get("parts", {}) for run in runs):
            texts.append(
                "The exchange is not seen apart: DistributedDataParallel waits for it in the backward pass."
            )
        if any("samples" not in run.figures["work"] for run in runs):
            texts.append("A script fetches its batches without a DataLoader: its samples are not seen.")
        if any(run.figures.get("weights") == RANKS_DIFFER for run in runs):
            texts.append("The final weights of a script differ between its ranks: it may not exchange gradients.")
        return texts


def side_of(trial: CompareTrial, run: RunRecord) -> Side:
    """Return a run as the check of equal work sees it."""
    return Side(trial.entry.name, trial.ranks, run.figures["work"], trial.variant.label)


def _with_samples(result: Result, results: Sequence[Result]) -> Result:
    """Give a script its samples per second: a step has as many samples as one of the job on as many ranks."""
    if result.trial.entry.is_job:
        return result
    jobs = (other for other in results if other.trial.entry.is_job and other.trial.ranks == result.trial.ranks)
    # The job may be a script, too, whose samples are not seen.
    sizes = [
        job.by_round("samples_per_s")[n] * job.by_round("step_s")[n]
        for job in jobs
        for n in job.by_round("samples_per_s")
    ]
    if not sizes:
        return result
    runs = {
        number: replace(run, figures={**run.figures, "samples_per_s": sizes[0] / run.figures["step_s"]})
        for number, run in result.runs.items()
    }
    return replace(result, runs=runs)


def _common_rounds(one: Result, other: Result) -> list[tuple[float, float]]:
    """Return the two speeds of each round that both ran in turn, in samples, or else in steps, per second."""
    if one.by_round("samples_per_s") and other.by_round("samples_per_s"):
        return one.in_turn(other, "samples_per_s")
    return [(other_s, one_s) for one_s, other_s in one.in_turn(other, "step_s")]
