"""What the runs of a comparison say: medians of each point, ratios of pairs, and what makes the difference."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from statistics import median
from typing import Any

from hvd_trainer.tools.compare.equal_work import Side, refuse_unequal
from hvd_trainer.tools.compare.trials import Point
from hvd_trainer.tools.runner.ratio import Ratio, ratio
from hvd_trainer.tools.runner.runs import Run
from hvd_trainer.tools.runner.step_stats import STEP_PARTS
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
WORTH_NAMING = 0.15
"""Of a difference: a part that makes less of it is not named."""


@dataclass(frozen=True)
class Measured:
    """One point, and its runs that came to their end, by round."""

    point: Point
    runs: Mapping[int, Run]
    note: str = ""
    """what became of the latest run that did not, unless its round went well later"""

    @property
    def done(self) -> bool:
        return bool(self.runs) and not self.note

    def by_round(self, name: str) -> dict[int, float]:
        """A figure of each run that has it."""
        return {
            number: run.figures[name] for number, run in self.runs.items() if run.figures.get(name) is not None
        }

    def median(self, name: str) -> float | None:
        values = self.by_round(name).values()
        return median(values) if values else None

    def part(self, name: str) -> float | None:
        """The median seconds of one part of a step."""
        values = [run.figures["parts"][name] for run in self.runs.values() if "parts" in run.figures]
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


@dataclass(frozen=True)
class Pair:
    """Two contestants on as many ranks: the speed of one as a multiple of the other's."""

    one: Measured
    other: Measured
    speed: Ratio

    def verdict(self) -> str:
        """In one sentence."""
        one, other, speed = self.one.point.contestant.name, self.other.point.contestant.name, self.speed
        where = f"On {plural(self.one.point.ranks, 'rank')}"
        if speed.low is None or speed.high is None:
            return (
                f"{where} {one} has {speed.value:.2f} times the speed of {other} in "
                f"{plural(speed.rounds, 'round')}, which is too few to tell a difference from noise."
            )
        interval = f"{plural(speed.rounds, 'round')}, 95 % interval {speed.low:.2f} to {speed.high:.2f}"
        if not speed.is_clear:
            return (
                f"{where} no difference between {one} and {other} is visible at this noise: "
                f"{speed.value:.2f} times ({interval})."
            )
        if speed.value > 1:
            return f"{where} {one} is {speed.value:.2f} times as fast as {other} ({interval})."
        interval = f"{plural(speed.rounds, 'round')}, 95 % interval {1 / speed.high:.2f} to {1 / speed.low:.2f}"
        return f"{where} {other} is {1 / speed.value:.2f} times as fast as {one} ({interval})."

    def why(self) -> str | None:
        """What of a step makes the difference; None where there is none, or nobody has measured its parts."""
        if not self.speed.is_clear:
            return None
        slow, fast = (self.other, self.one) if self.speed.value > 1 else (self.one, self.other)
        parts = {name: (slow.part(name), fast.part(name)) for name in STEP_PARTS}
        more = {name: a - b for name, (a, b) in parts.items() if a is not None and b is not None}
        total = sum(more.values())
        if not more or total <= 0:
            return None
        named = sorted(
            (n for n in more if abs(more[n]) >= WORTH_NAMING * total), key=more.__getitem__, reverse=True
        )
        said = ", ".join(f"{PART_TEXTS[name]} {1000 * more[name]:+.2f} ms" for name in named)
        name = slow.point.contestant.name
        return f"A step of {name} takes {1000 * total:.2f} ms longer: {said}."

    def same_model(self) -> str | None:
        """Whether both have trained the same; None where nobody has kept the weights."""
        left, right = self.one.weights, self.other.weights
        if left is None or right is None:
            return None
        if left == right != "differ":
            return "Both have trained the same weights, to the last bit."
        losses = [one.median("train_loss") for one in (self.one, self.other)]
        if None in losses:
            return "Their weights differ."
        return f"Their weights differ; the final training losses are {losses[0]:.6f} and {losses[1]:.6f}."


@dataclass(frozen=True)
class Comparison:
    """All that was measured."""

    job: tuple[str, ...]
    strong: bool
    """whether the global batch is the same on any number of ranks"""
    machine: Mapping[str, Any]
    measured: Sequence[Measured]

    @classmethod
    def of(
        cls, plan: Sequence[Point], runs: Sequence[Run], *, job: tuple[str, ...], strong: bool, machine: Any
    ) -> Comparison:
        """From all runs in a folder, of which only those of the plan count."""
        measured = []
        for point in plan:
            last = {run.round: run for run in runs if run.key == point.key}
            bad = [run for run in last.values() if run.state != "done"]
            good = {number: run for number, run in sorted(last.items()) if run.state == "done"}
            note = f"{bad[-1].state} in round {bad[-1].round}: {bad[-1].note}" if bad else ""
            measured.append(Measured(point, good, note or ("" if good else "not run")))
        return cls(job, strong, machine, [_with_rates(its, measured) for its in measured])

    def check_work(self) -> None:
        """All runs must have done the same.

        Raises:
            OptionError: two have not.
        """
        sides = [
            Side(its.point.contestant.name, its.point.ranks, run.figures["work"])
            for its in self.measured
            for run in its.runs.values()
        ]
        for one, other in combinations(sides, 2):
            refuse_unequal(one, other, self.strong)

    def base_of(self, its: Measured) -> Measured | None:
        """The same contestant on one rank."""
        contestant = its.point.contestant
        found = (m for m in self.measured if m.point.ranks == 1 and m.point.contestant == contestant)
        return next((m for m in found if m.median("samples_per_s") is not None), None)

    def speed_up(self, its: Measured) -> float | None:
        """How many times the speed of one rank."""
        base = self.base_of(its)
        return (
            None
            if base is None
            else _paired(its, base, lambda a, b: median(x / y for x, y in zip(a, b, strict=True)))
        )

    def efficiency(self, its: Measured) -> float | None:
        """The speed-up by the number of ranks."""
        speed_up = self.speed_up(its)
        return None if speed_up is None else speed_up / its.point.ranks

    @cached_property
    def pairs(self) -> list[Pair]:
        """The engines among each other, and each other script beside the engine that it uses."""
        found = []
        for one, other in combinations(self.measured, 2):
            first, second = one.point.contestant, other.point.contestant
            both_ours = first.is_ours and second.is_ours
            if one.point.ranks != other.point.ranks or not (both_ours or first.engine == second.engine):
                continue
            speed = _paired(one, other, ratio)
            if speed is not None:
                found.append(Pair(one, other, speed))
        return found

    def verdicts(self) -> list[str]:
        """All pairs, in words."""
        return [" ".join(filter(None, (pair.verdict(), pair.why(), pair.same_model()))) for pair in self.pairs]


def _with_rates(its: Measured, everyone: Sequence[Measured]) -> Measured:
    """A script that is not ours takes as many samples in a step as the job does on as many ranks."""
    if its.point.contestant.is_ours:
        return its
    ours = (m for m in everyone if m.point.contestant.is_ours and m.point.ranks == its.point.ranks)
    sizes = [m.by_round("samples_per_s")[n] * m.by_round("step_s")[n] for m in ours for n in m.by_round("step_s")]
    if not sizes:
        return its
    runs = {
        number: replace(run, figures={**run.figures, "samples_per_s": sizes[0] / run.figures["step_s"]})
        for number, run in its.runs.items()
    }
    return replace(its, runs=runs)


def _paired(one: Measured, other: Measured, combine: Callable[[list[float], list[float]], Any]) -> Any:
    """What is made of the speeds of the rounds that both have; None if there are none."""
    ones, others = one.by_round("samples_per_s"), other.by_round("samples_per_s")
    rounds = [number for number in ones if number in others]
    return combine([ones[n] for n in rounds], [others[n] for n in rounds]) if rounds else None
