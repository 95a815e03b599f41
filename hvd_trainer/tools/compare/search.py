"""Search the fastest settings of an engine: which groups are worth a race, the races, and the proof.

    bounds      the job without exchanging, without fetching data: no setting of a group can gain more than that
    races       group by group, each change beside the present settings; the winner is adopted, until none wins
    proof       the adopted settings beside the job as it was, in fresh runs: a winner's figures are too good

What a run is, is not known here: a function tells its speed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hvd_trainer.errors import OptionError
from hvd_trainer.measure.formats import percent
from hvd_trainer.measure.stats import Ratio, pool, ratio
from hvd_trainer.tools.compare.race import MIN_ROUNDS, Race, Standing
from hvd_trainer.tools.compare.settings import GROUPS, SCRIPT_UNTRIED, Group, describe, find_changes


class Speed(NamedTuple):
    """The speed of a run."""

    value: float
    """samples, or steps, per second"""
    go: float
    """when the command began that made it: only runs of one command are pairs"""


Settings = Mapping[str, Any]
Measure = Callable[[str, Settings], Speed | None]
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
    """of the job's work, and `cores`"""
    fixed: Collection[str]
    """options that are not changed"""
    measure: Measure
    rounds: int
    """of a race at most, and of the proof"""
    least_gain: float
    """below which a gain is not worth a search, as a fraction"""
    lossy: bool
    """whether gradients may be rounded, so that compression is tried"""
    logs: list[list[float]] = field(default_factory=list, init=False)
    """of earlier races, for their noise"""
    result: SearchResult = field(default_factory=SearchResult, init=False)

    def run(self) -> SearchResult:
        """Search, and return the results.

        Raises:
            OptionError: the unchanged job does not run.
        """
        for group in self._select_groups():
            self._race_group(group)
        self.result.noise, _ = pool(self.logs)
        if self.result.settings:
            self._prove()
        return self.result

    def _select_groups(self) -> list[Group]:
        """Return the groups that can gain enough, in the order of their races.

        Threads come first, on which all else depends, compression last, and between them what has most to gain.
        """
        untried = self.result.untried
        if not self.lossy and "compression" not in self.fixed:
            untried["compression"] = "it rounds the gradients: type --lossy to have it tried"
        if self.facts["world_size"] == 1:
            untried |= dict.fromkeys(("exchange", "compression"), "one rank exchanges nothing")
        if "uses_hvd" in self.facts:
            untried |= SCRIPT_UNTRIED
        elif self.facts["in_memory"]:
            untried["data"] = "all of it is in memory"
        elif self.facts["has_own_loader"]:
            untried["data"] = "it comes from a loader of its own"
        left_out = {label: group for label, group in WITHOUT.items() if group not in untried}
        race = Race(list(left_out), self.least_gain, self.rounds)
        while not race.is_over and any(self._is_undecided(race.standing(label)) for label in left_out):
            self._run_round(race, {label: {"leave_out": group} for label, group in left_out.items()})
        gains = {"threads": math.inf, "compression": 0.0}
        for label, group in left_out.items():
            if label in race.broken:
                continue  # nothing is known of what it costs
            bound = race.standing(label)
            gains[group] = bound.speed
            # A setting gains less than leaving the whole part out.
            if bound.verdict == "no faster" or bound.speed < 1 + self.least_gain:
                untried[group] = (
                    f"without it at all the job has {bound.speed:.2f} times the speed ({bound.interval})"
                )
                # A step that is a fraction of the job's scatters by more, as a ratio: only one that is as long
                # says how much the job's does.
                self.logs.append(race.logs[label])
        if "exchange" in untried:
            untried["compression"] = untried["exchange"]
        for group, why in untried.items():
            self._say(f"{GROUPS[group]}: {why}")
        return sorted(
            (group for group in GROUPS if group not in untried), key=lambda group: -gains.get(group, 1.0)
        )

    def _say(self, text: str) -> None:
        print(f"{self.backend}: {text}", flush=True)

    def _is_undecided(self, bound: Standing) -> bool:
        """Return whether more rounds could show that a group cannot gain enough."""
        is_promising = bound.rounds >= MIN_ROUNDS and bound.speed >= 1 + self.least_gain
        return bound.verdict == "open" and not is_promising

    def _race_group(self, group: Group) -> None:
        """Adopt the winner of a race, and race the group's other options on top of it, until none wins."""
        settled: set[str] = set()
        """options of which a value was adopted, and changes that are no faster"""
        while True:
            changes = find_changes(group, self.backend, self.facts, self.result.settings, self.fixed)
            left = {
                describe(change): change for change in changes if settled.isdisjoint([*change, describe(change)])
            }
            if not left:
                return
            race = Race(list(left), self.least_gain, self.rounds, list(self.logs))
            while not race.is_over:
                self._run_round(
                    race, {label: {**self.result.settings, **change} for label, change in left.items()}
                )
            self.logs += race.logs.values()
            for label in left:
                tried = TriedChange(group, label, race.standing(label), adopted=label == race.winner)
                self.result.tried.append(tried)
                settled |= {label} if tried.standing.verdict == "no faster" else set()
            if race.winner is None:
                return
            self._say(f"adopted: {race.winner}")
            self.result.settings |= left[race.winner]
            settled |= {*left[race.winner]}

    def _run_round(self, race: Race, settings: Mapping[str, Settings]) -> None:
        """Run one round of the present settings and the candidates still in the race."""
        running = {name: settings[name] for name in race.running}
        speeds = self._run_in_turn({AS_IT_IS: self.result.settings, **running}, [AS_IT_IS], race.held)
        race.note(speeds.pop(AS_IT_IS) or 0.0, speeds)

    def _run_in_turn(
        self, settings: Mapping[str, Settings], known: Collection[str], turn: int
    ) -> dict[str, float | None]:
        """Return the speed with each of several settings, run in alternating order; None if the job does not run.

        Those that another command has run than the first of them are left out.

        Args:
            known: labels of settings with which the job has run before.

        Raises:
            OptionError: it does not run with those.
        """
        speeds: dict[str, Speed | None] = {}
        for label in list(settings)[:: -1 if turn % 2 else 1]:
            speeds[label] = self.measure(label, settings[label])
            if speeds[label] is None and label in known:
                raise OptionError(
                    f"The job failed {label}, with settings that it has run with before. Look at its last output, "
                    f"and type the same command again: it continues from here"
                )
        first = speeds[next(iter(settings))]
        return {
            label: None if speed is None else speed.value
            for label, speed in speeds.items()
            if speed is None or first is None or speed.go == first.go
        }

    def _prove(self) -> None:
        both: dict[str, Settings] = {"before": {}, "tuned": self.result.settings}
        pairs: list[tuple[float, float]] = []
        turn = 0
        while len(pairs) < self.rounds:
            speeds = self._run_in_turn(both, list(both), turn)
            turn += 1
            if (tuned := speeds.get("tuned")) and (before := speeds["before"]):
                pairs.append((tuned, before))
        self.result.gain = gain = ratio(*zip(*pairs, strict=True))
        if not gain.is_clear or gain.value < 1:
            self._say(f"not confirmed: {percent(gain.value - 1)} faster in fresh runs ({gain.interval})")
            self.result.settings = {}
