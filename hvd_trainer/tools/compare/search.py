"""Search the fastest settings of an engine: which groups are worth a race, the races, and the proof.

    bounds      the job without exchanging, without fetching data: no setting of a group can gain more than that
    races       group by group, each change beside the present settings; the winner is adopted, until none wins
    proof       the adopted settings beside the job as it was, in fresh runs: a winner's figures are too good

What a run is, is not known here: a function tells its speed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hvd_trainer.errors import OptionError
from hvd_trainer.measure.formats import percent
from hvd_trainer.measure.stats import Noise, Ratio, interval_text, ratio
from hvd_trainer.tools.compare.race import MIN_ROUNDS, Race, Standing
from hvd_trainer.tools.compare.settings import GROUPS, SCRIPT_UNTRIED, Change, Group, find_changes


class Speed(NamedTuple):
    """The speed of a run."""

    value: float
    """samples, or steps, per second"""
    go: float
    """when the command began that made it: only runs of one command are pairs"""


Measure = Callable[[str, Mapping[str, Any]], Speed | None]
"""From a label and settings to the speed of a run; None if the job does not run with them."""
WITHOUT: Mapping[str, Group] = {"without the exchange": "exchange", "without fetching data": "data"}
AS_IT_IS = "as it is"


class TriedChange(NamedTuple):
    """The result of one change in one race."""

    group: Group
    label: str
    standing: Standing
    adopted: bool


@dataclass
class SearchResult:
    """The results of a search."""

    settings: dict[str, Any] = field(default_factory=dict)
    """the options that certainly make the job faster"""
    gain: Ratio | None = None
    """the speed with them as a multiple of the unchanged job's, in runs of their own; None without settings"""
    tried: list[TriedChange] = field(default_factory=list)
    untried: dict[Group, str] = field(default_factory=dict)
    """groups that cannot gain enough, with the reason"""
    noise: float = 0.0
    """the standard deviation of the ratio of two runs' speeds"""


@dataclass
class Search:
    """The search of one engine."""

    backend: str
    facts: Mapping[str, Any]
    """run.json of the job, and `cores`"""
    fixed: Collection[str]
    """options that are not changed"""
    measure: Measure
    rounds: int
    """of a race at most, and of the proof"""
    least_gain: float
    """below which a gain is not worth a search, as a fraction"""
    lossy: bool
    """whether gradients may be rounded, so that compression is tried"""
    noise: Noise = field(default_factory=Noise, init=False)
    result: SearchResult = field(default_factory=SearchResult, init=False)

    def run(self) -> SearchResult:
        """Search, and return the results.

        Raises:
            OptionError: the unchanged job does not run.
        """
        for group in self._select_groups():
            self._race_group(group)
        self.result.noise = self.noise.deviation
        if self.result.settings:
            self._prove()
        return self.result

    def _select_groups(self) -> list[Group]:
        """Return the groups that can gain enough, in the order of their races.

        Threads come first, on which all else depends, compression last, and between them what has most to gain.
        """
        if not self.lossy and "compression" not in self.fixed:
            self.result.untried["compression"] = "it rounds the gradients: type --lossy to have it tried"
        if self.facts["world_size"] == 1:
            self.result.untried |= dict.fromkeys(("exchange", "compression"), "one rank exchanges nothing")
        if "uses_hvd" in self.facts:
            self.result.untried |= SCRIPT_UNTRIED
        elif self.facts["in_memory"]:
            self.result.untried["data"] = "all of it is in memory"
        elif self.facts["has_own_loader"]:
            self.result.untried["data"] = "it comes from a loader of its own"
        left_out = {label: group for label, group in WITHOUT.items() if group not in self.result.untried}
        race = self._race(list(left_out))
        while not race.is_over and any(self._is_undecided(race.standing(label)) for label in left_out):
            self._run_round(race, {label: {"leave_out": group} for label, group in left_out.items()})
        # Where the job does not run without it, nothing is known of what it costs.
        bounds = {group: race.standing(label) for label, group in left_out.items() if label not in race.broken}
        for group, bound in bounds.items():
            # A setting gains less than leaving the whole part out.
            if bound.verdict == "no faster" or bound.speed < 1 + self.least_gain:
                self.result.untried[group] = (
                    f"without it at all the job has {bound.speed:.2f} times the speed "
                    f"({interval_text(bound.low, bound.high, bound.level)})"
                )
        # A step that is a fraction of the job's scatters by more, as a ratio: only one that is as long says how
        # much the job's does.
        alike = (label for label, group in left_out.items() if group in bounds and group in self.result.untried)
        self.noise = race.known_noise(alike)
        if "exchange" in self.result.untried:
            self.result.untried["compression"] = self.result.untried["exchange"]
        for group, why in self.result.untried.items():
            self._say(f"{GROUPS[group]}: {why}")
        gains = {
            "threads": math.inf,
            "compression": 0.0,
            **{group: bound.speed for group, bound in bounds.items()},
        }
        left = (group for group in GROUPS if group not in self.result.untried)
        return sorted(left, key=lambda group: -gains.get(group, 1.0))

    def _say(self, text: str) -> None:
        print(f"{self.backend}: {text}", flush=True)

    def _is_undecided(self, bound: Standing) -> bool:
        """Return whether more rounds could show that a group cannot gain enough."""
        is_promising = bound.rounds >= MIN_ROUNDS and bound.speed >= 1 + self.least_gain
        return bound.verdict == "open" and not is_promising

    def _race_group(self, group: Group) -> None:
        """Adopt the winner of a race, and race the group's other options on top of it, until none wins."""
        hopeless: set[str] = set()
        decided: set[str] = set()
        while True:
            left = (change for change in self._changes(group) if change.option not in decided)
            winner = self._race_changes([change for change in left if change.label not in hopeless])
            if winner is None:
                return
            self._say(f"adopted: {winner.label}")
            self.result.settings = winner.after(self.result.settings)
            hopeless |= {tried.label for tried in self.result.tried if tried.standing.verdict == "no faster"}
            decided.add(winner.option)

    def _changes(self, group: Group) -> list[Change]:
        return find_changes(group, self.backend, self.facts, self.result.settings, self.fixed)

    def _race_changes(self, candidates: Sequence[Change]) -> Change | None:
        """Race changes, record the results of all, and return the winner."""
        if not candidates:
            return None
        by_label = {change.label: change for change in candidates}
        race = self._race(list(by_label))
        settings = {label: change.after(self.result.settings) for label, change in by_label.items()}
        while not race.is_over:
            self._run_round(race, settings)
        self.noise = race.known_noise()
        group = candidates[0].group
        self.result.tried += [
            TriedChange(group, label, race.standing(label), adopted=label == race.winner) for label in by_label
        ]
        return None if race.winner is None else by_label[race.winner]

    def _race(self, names: Sequence[str]) -> Race:
        return Race(names, self.least_gain, self.rounds, self.noise)

    def _run_round(self, race: Race, settings: Mapping[str, Mapping[str, Any]]) -> None:
        """Run one round of the present settings and the candidates still in the race, in alternating order."""
        everyone = [AS_IT_IS, *race.running]
        known = {AS_IT_IS: self.result.settings, **settings}
        speeds = {
            label: (self._must_run if label == AS_IT_IS else self.measure)(label, known[label])
            for label in everyone[:: -1 if race.held % 2 else 1]
        }
        present = speeds.pop(AS_IT_IS)
        assert present is not None
        race.note(
            present.value,
            {
                label: None if speed is None else speed.value
                for label, speed in speeds.items()
                if speed is None or speed.go == present.go
            },
        )

    def _must_run(self, label: str, settings: Mapping[str, Any]) -> Speed:
        speed = self.measure(label, settings)
        if speed is None:
            raise OptionError(
                f"The job failed {label}, with settings that it has run with before. Look at its last output, and "
                f"type the same command again: it continues from here"
            )
        return speed

    def _prove(self) -> None:
        both = {"before": {}, "tuned": self.result.settings}
        pairs: list[tuple[float, float]] = []
        turn = 0
        while len(pairs) < self.rounds:
            speeds = {label: self._must_run(label, both[label]) for label in list(both)[:: -1 if turn % 2 else 1]}
            turn += 1
            if speeds["tuned"].go == speeds["before"].go:  # else a stopped command has made one of them
                pairs.append((speeds["tuned"].value, speeds["before"].value))
        self.result.gain = gain = ratio(*zip(*pairs, strict=True))
        if not gain.is_clear or gain.value < 1:
            self._say(f"not confirmed: {percent(gain.value - 1)} faster in fresh runs ({gain.interval})")
            self.result.settings = {}
