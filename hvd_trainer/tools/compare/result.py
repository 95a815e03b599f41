"""The results of a comparison: medians of each trial, ratios of pairs, and what makes the difference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from typing import Any

from hvd_trainer.measure.figures import RANKS_DIFFER, STEP_PARTS
from hvd_trainer.measure.formats import percent
from hvd_trainer.measure.machine import Ran
from hvd_trainer.measure.report import Verdict
from hvd_trainer.measure.results import FIRST, TrialResult
from hvd_trainer.measure.stats import Ratio, ratio, ratios
from hvd_trainer.measure.trials import RunRecord
from hvd_trainer.tools.compare.plan import Axis, CompareTrial
from hvd_trainer.utils.text import plural

MEDIANS = (
    *("tokens_per_s", "step_s", "step_p50_s", "step_p95_s", *(f"{part}_s" for part in STEP_PARTS), "bubble"),
    *("startup_s", "peak_memory_mb", *FIRST),
)
"""Figures of which a trial's median is shown as it is."""
MIN_SHARE = 0.15
"""A part of a step is named if it makes at least this share of a difference."""
Result = TrialResult[CompareTrial]


@dataclass(frozen=True)
class Pair:
    """Two trials on as many ranks: engines with the same values of options, or an engine with other values.

    In that case `other` has the first value of each.
    """

    one: Result
    other: Result
    speed: Ratio
    """of one, as a multiple of the other's"""

    @property
    def is_of_values(self) -> bool:
        """Whether the two are one engine with different values of the options that vary."""
        return self.one.trial.variant != self.other.trial.variant

    @property
    def names(self) -> tuple[str, str]:
        """How the two are called in a sentence."""
        one, other = self.one.trial, self.other.trial
        if self.is_of_values:
            return f"{one.entry} with {one.variant}", f"{other.entry} with {other.variant}"
        return one.entry, other.entry

    def verdict(self, *details: str) -> Verdict:
        """Say which one is faster, and why.

        Args:
            details: further sentences.
        """
        (one, other), speed, trial = self.names, self.speed, self.one.trial
        if speed.is_clear and speed.value < 1:
            one, other, speed = other, one, speed.inverse
        rounds, interval = plural(speed.rounds, "round"), speed.interval
        times = f"{speed.value:.2f} times"
        if speed.low is None:
            said = f"{one} has {times} the speed of {other} in {rounds}, which is too few to tell a "
            said += "difference from noise."
        elif speed.matters:
            said = f"{one} is {times} as fast as {other} (mean of {rounds}, {interval})."
        elif speed.is_negligible or speed.is_clear:
            said = f"no difference that matters {'is' if speed.is_negligible else 'is shown'} between {one} and "
            said += f"{other}: {speed.value:.3f} times, where {percent(speed.least)} counts (mean of {rounds}, "
            said += f"{interval})."
        else:
            said = f"no difference between {one} and {other} is visible at this noise: {times} "
            said += f"(mean of {rounds}, {interval})."
        with_values = f" with {trial.variant}," if trial.variant and not self.is_of_values else ""
        return Verdict(
            f"On {plural(trial.ranks, 'rank')}{with_values} {said}",
            "sure" if speed.matters or speed.is_negligible else "unsure",
            [text for text in (self.why(), self.same_model(), *details) if text],
            badge=speed.badge,
            ratio=speed,
            sides=(f"{other} is faster", f"{one} is faster"),
        )

    def why(self) -> str | None:
        """Say which parts of a step make the difference; None where there is none, or no part was measured."""
        if not self.speed.matters:
            return None
        slow, fast = (self.other, self.one) if self.speed.value > 1 else (self.one, self.other)
        parts = {name: (slow.median(f"{name}_s"), fast.median(f"{name}_s")) for name in STEP_PARTS}
        more = {name: a - b for name, (a, b) in parts.items() if a is not None and b is not None}
        total = sum(more.values())
        if not more or total <= 0:
            return None
        named = sorted((n for n in more if abs(more[n]) >= MIN_SHARE * total), key=more.__getitem__, reverse=True)
        parts_text = ", ".join(f"{STEP_PARTS[name]} {1000 * more[name]:+.2f} ms" for name in named)
        name = self.names[1] if slow is self.other else self.names[0]
        return f"A step of {name} takes {1000 * total:.2f} ms longer: {parts_text}."

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
    least: float = 0.0
    """the smallest difference in speed that matters, as a fraction"""

    @classmethod
    def of(cls, trials: Sequence[CompareTrial], runs: Sequence[RunRecord], **known: Any) -> Comparison:
        """Collect the results of the trials from all runs in a folder.

        Args:
            known: the other fields of a comparison.
        """
        results = TrialResult.collect(trials, runs)
        return cls(results=[_with_samples(result, results) for result in results], **known)

    @cached_property
    def runs(self) -> list[RunRecord]:
        """All runs that came to their end."""
        return [run for result in self.results for run in result.runs.values()]

    @cached_property
    def figures(self) -> dict[str, dict[str, Any]]:
        """All figures by the keys of trials and by name; None: not measured."""
        return {result.trial.key: self._figures_of(result) for result in self.results}

    def _figures_of(self, result: Result) -> dict[str, Any]:
        rate, step_s, speed_up = result.median("samples_per_s"), result.median("step_s"), self.speed_up(result)
        rates, ranks = result.by_round("samples_per_s").values(), result.trial.ranks
        return {
            "samples_per_s": rate,
            # Of a script whose samples are not seen.
            "steps_per_s": 1 / step_s if step_s is not None and rate is None else None,
            "lowest": min(rates, default=None),
            "highest": max(rates, default=None),
            "per_rank": None if rate is None else rate / ranks,
            "speed_up": speed_up,
            "efficiency": None if speed_up is None else speed_up / ranks,
            **{name: result.median(name) for name in MEDIANS},
            "weights": result.weights,
        }

    def speed_up(self, result: Result) -> float | None:
        """Return the speed as a multiple of that of the same entry and variant on one rank."""
        bases = (o for o in self.results if o.trial.ranks == 1 and o.trial.series == result.trial.series)
        rounds = [pair for base in bases for pair in result.speeds_in_turn(base)]
        return ratio(*zip(*rounds, strict=True)).value if rounds else None

    @cached_property
    def neighbours(self) -> list[tuple[Result, Result, list[tuple[float, float]]]]:
        """What is compared on as many ranks, where both have runs.

        These are the engines among each other, each other script beside the engine that it uses, and each engine
        with other values of options beside itself with the first ones. With the speeds of each round that both ran
        in turn.
        """
        pairs = []
        for one, other in combinations(self.results, 2):
            first, second = one.trial, other.trial
            if first.ranks != second.ranks or not (one.runs and other.runs):
                continue
            is_script = first.native or second.native
            if first.variant == second.variant and (not is_script or first.engine == second.engine):
                pairs.append((one, other, one.speeds_in_turn(other)))
            elif first.is_first and first.entry == second.entry:
                pairs.append((other, one, other.speeds_in_turn(one)))
        return pairs

    @cached_property
    def pairs(self) -> list[Pair]:
        """The neighbours that have run in turn, with the ratio of their speeds, corrected for their number."""
        known = [(one, other, speeds) for one, other, speeds in self.neighbours if speeds]
        series = [([a for a, _ in speeds], [b for _, b in speeds]) for _, _, speeds in known]
        compared = ratios(series, least=self.least)
        return [Pair(one, other, speed) for (one, other, _), speed in zip(known, compared, strict=True)]

    @property
    def of_values(self) -> list[list[Pair]]:
        """The pairs of each engine on each number of ranks with its values of options, the fastest first."""
        groups: dict[tuple[str, int], list[Pair]] = {}
        for pair in self.pairs:
            if pair.is_of_values:
                groups.setdefault((pair.one.trial.entry, pair.one.trial.ranks), []).append(pair)
        return [sorted(pairs, key=lambda pair: -pair.speed.value) for pairs in groups.values()]

    @property
    def apart(self) -> list[str]:
        """A sentence for each pair of neighbours that have not run in turn."""
        return [
            f"{one.trial.label} and {other.trial.label} have run at different times, and in no round in turn: "
            f"nothing is said of which one is faster"
            for one, other, speeds in self.neighbours
            if not speeds
        ]

    @property
    def batches(self) -> dict[int, set[int]]:
        """The global batches by number of ranks, as far as they are known."""
        sizes: dict[int, set[int]] = {}
        for result in self.results:
            if result.global_batch_size is not None:
                sizes.setdefault(result.trial.ranks, set()).add(result.global_batch_size)
        return sizes

    @property
    def unseen(self) -> list[str]:
        """A sentence for each thing that cannot be seen of a script."""
        runs = [run.figures for run in self.runs if not run.figures["work"].get("on_trainer")]
        texts = {
            "The exchange is not seen apart: it is part of the backward pass, or of the script's own calls.": any(
                "exchange" not in figures.get("parts", {}) for figures in runs
            ),
            "A script fetches its batches without a DataLoader: its samples are not seen.": any(
                "samples" not in figures["work"] for figures in runs
            ),
            "The final weights of a script differ between its ranks: it may not exchange gradients.": any(
                figures.get("weights") == RANKS_DIFFER for figures in runs
            ),
        }
        return [text for text, holds in texts.items() if holds]


def _with_samples(result: Result, results: Sequence[Result]) -> Result:
    """Give a script its samples per second: a step has as many samples as one of the job on as many ranks."""
    jobs = (other for other in results if not other.trial.native and other.trial.ranks == result.trial.ranks)
    # The job may be a script, too, whose samples are not seen.
    figures = (figures for job in jobs for figures in job.rounds.values() if "samples_per_s" in figures)
    size = next((known["samples_per_s"] * known["step_s"] for known in figures), None)
    if not result.trial.native or size is None:
        return result
    runs = {
        number: replace(run, figures={**run.figures, "samples_per_s": size / run.figures["step_s"]})
        for number, run in result.runs.items()
    }
    return replace(result, runs=runs)
