"""The trials of a diagnosis: ways to run the job, of which the differences show what each part costs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from hvd_trainer.errors import OptionError
from hvd_trainer.jobs.all_reduce import AllReduceTrial
from hvd_trainer.measure.measured import MeasuredTrial
from hvd_trainer.measure.tool_folder import remove_inner
from hvd_trainer.measure.trials import RunRecord, Trial, TrialRunner, in_rounds
from hvd_trainer.tools.diagnose.causes import MIN_SHARE, OF_THE_MACHINE, find_causes, quiet_s
from hvd_trainer.tools.diagnose.evidence import ALONE, NO_EXCHANGE, NORMAL, TWICE, Evidence, Line
from hvd_trainer.tools.diagnose.machine_use import MachineUse, MachineWatch, other_cores
from hvd_trainer.tools.diagnose.own_code import of_collectives
from hvd_trainer.tools.diagnose.profile import RankProfile, mark_lone, merge, read_profiles
from hvd_trainer.tools.diagnose.roles import WAITING
from hvd_trainer.utils.process import cpu_ids
from hvd_trainer.utils.text import plural

WARMUP_STEPS = 5
"""Steps at the beginning of each run that do not count."""
FIRST_STEPS = 40
"""Counted steps of the first run."""
MIN_STEPS, MAX_STEPS = 10, 2000
"""Bounds of the counted steps of a run."""
RUN_S = 4.0
"""How long a run trains, about, where the budget allows it."""
MIN_SAMPLED_S = 1.5
"""Seconds of the normal run whose stacks suffice for a verdict."""
MAX_ROUNDS = 3
MIN_REST = 0.3
"""Fraction of a step from which it is worth other runs to explain it."""
EXCHANGE_BYTES = tuple(2**10 * 4**step for step in range(8))
"""Sizes of the exchanges that are timed: 1 kB to 16 MB."""


class Trials:
    """Runs the job in several ways, and collects what they show.

    Args:
        budget_s: seconds that all runs together may take.
    """

    def __init__(self, normal: MeasuredTrial, folder: Path, budget_s: float) -> None:
        self.normal = normal
        self.runner = TrialRunner(folder, budget_s=budget_s, limit_option="--budget-s", resume=False)
        self._budget_s, self._kept = budget_s, folder / "log"
        self.figures: dict[str, list[Mapping[str, Any]]] = {}
        """by the trials' labels"""
        self.profiles: list[list[RankProfile]] = []
        """of each normal run, in rank order"""
        self._machine = MachineUse()
        self._line: Line | None = None

    @property
    def is_spent(self) -> bool:
        """Whether the end of the budget has killed a run."""
        return self.runner.left_s <= 0 and any(run.state == "killed" for run in self.runner.last.values())

    def evidence(self) -> Evidence:
        """Return all that is known so far."""
        facts: dict[str, Any] = {}
        if NORMAL in self.figures:
            first = self.figures[NORMAL][0]
            used = first.get("peak_memory_mb", 0.0) * 2**20 * self.normal.ranks
            facts = dict(first["work"]) | {"memory_share": used / psutil.virtual_memory().total}
        profiles = merge(self.profiles)
        mark_lone(profiles)
        return Evidence(
            profiles=profiles,
            machine=replace(self._machine, other_cores=other_cores(profiles)),
            cores=len(cpu_ids()),
            machine_cores=os.cpu_count() or 1,
            is_trainer_job=any(profile.on_trainer for profile in profiles),
            facts=facts,
            runs=dict(self.figures),
            line=self._line,
        )

    def measure(self) -> str:
        """Run what is worth it within the budget, and return why the job has failed; empty if it has not."""
        first = self.run(self.normal, FIRST_STEPS)
        if self.is_spent:
            asked = f"the first run, of {plural(WARMUP_STEPS + FIRST_STEPS, 'step')}"
            return self._too_little(f"{asked}: it {first.why(self.runner.folder)}") + "."
        if first.state != "done":
            return f"The job ended early when it was run {NORMAL}: {first.why(self.runner.folder)}."
        if not self.profiles:
            return "A rank has left no record of its stacks."
        step_s = self.figures[NORMAL][0]["step_s"]
        start_s = max(first.seconds - step_s * (WARMUP_STEPS + FIRST_STEPS), 1.0)
        print(f"{NORMAL}: {1000 * self.evidence().step_s:.2f} ms per step, {start_s:.0f} s to start", flush=True)
        steps = steps_of(min(RUN_S, self._budget_s / 10), step_s)
        cost_s = start_s + step_s * (WARMUP_STEPS + steps)
        sampled_s = min((profile.seconds for profile in self.profiles[0]), default=0.0)
        if sampled_s < MIN_SAMPLED_S and cost_s < self.runner.left_s:
            self.run(self.normal, steps)
        variants = plan_variants(self.evidence(), self.normal)
        # Another run measures the exchange itself.
        max_runs = max(0, int(self.runner.left_s / cost_s) - 1)
        plan = [variant for _, variant in in_rounds(variants, MAX_ROUNDS)][:max_runs]
        if variants and not plan:
            self.runner.warn(self._too_little("further runs, which would explain the rest"))
        if plan:
            what = f"{plural(len(plan), 'more run')} of {plural(WARMUP_STEPS + steps, 'step')}"
            print(f"{what}: about {len(plan) * cost_s:.0f} s", flush=True)
        for place, variant in enumerate(plan, 1):
            if self.runner.left_s < cost_s:
                made = f"{place - 1} of {plural(len(plan), 'further run')} were made"
                self.runner.warn(f"{made}: --budget-s is spent")
                break
            run, said = self.run(variant, steps), ""
            if run.state == "done":
                said = f"{1000 * self.evidence().mean_s(variant.label):.2f} ms per step"
            print(f"{place}/{len(plan)}  {variant.label}: {said or run.note}", flush=True)
        has_collectives = any(cause.kind == "collective" for cause in find_causes(self.evidence()))
        if self.runner.left_s > cost_s and (NO_EXCHANGE in self.figures or has_collectives):
            normal, sizes = self.normal, ("--sizes", *map(str, EXCHANGE_BYTES))
            run = self._run(AllReduceTrial("exchanges", normal.engine, normal.ranks, normal.threads, sizes))
            if run.state == "done":
                self._line = Line.through(run.figures["seconds"])
        return ""

    def run(self, trial: MeasuredTrial, steps: int) -> RunRecord:
        """Run a trial once, and keep its figures under its label; of a normal run also its stacks.

        All are sampled alike, so that what sampling costs is in each figure that is subtracted.

        Args:
            steps: that count.
        """
        is_normal = trial.label == NORMAL
        trial = replace(trial, steps=WARMUP_STEPS + steps, record={"sample_stacks": True})
        watch, profiles = MachineWatch(), []
        try:
            run = self._run(trial)
        finally:
            profiles = read_profiles(self._kept, trial.ranks)
            if is_normal and profiles:
                self.profiles.append(profiles)
                self._machine = watch.end()
        if run.state == "done":
            if "step_s" not in run.figures:
                made = plural(run.figures["work"]["steps"], "step")
                raise OptionError(
                    f"The job makes {made}, and the first {WARMUP_STEPS} do not count: let it train longer"
                )
            figures = {"mean_s": run.figures["step_s"], **run.figures, **run.figures.get("typical", {})}
            if "computing_s" in figures:
                figures["compute_s"] = min(figures["computing_s"]) - figures["parts"]["data"]
            own = of_collectives(Evidence(profiles=profiles), 0.0, 0.0) if profiles else ()
            figures["collective_s"] = sum(cause.seconds for cause in own)
            figures["apart_s"] = figures["step_s"] - figures["collective_s"]
            self.figures.setdefault(trial.label, []).append(figures)
        return run

    def _run(self, trial: Trial) -> RunRecord:
        remove_inner(self._kept)
        number = len(self.runner.last) + 1  # each run is a new one
        run = self.runner.run(trial, number, keep=self._kept)
        if run.state != "done" and number > 1:  # without the first there is no diagnosis
            self.runner.warn(f"a further run ({trial.label}) has failed: {run.why(self.runner.folder)}")
        return run

    def _too_little(self, what: str) -> str:
        """Return that the budget did not suffice for something, and what to type."""
        return f"--budget-s {self._budget_s:g} did not suffice for {what}. Type --budget-s {2 * self._budget_s:g}"


def steps_of(seconds: float, step_s: float) -> int:
    """Return how many steps of a run are counted that trains for about so many seconds."""
    return min(MAX_STEPS, max(MIN_STEPS, round(seconds / step_s)))


def plan_variants(evidence: Evidence, normal: MeasuredTrial) -> list[MeasuredTrial]:
    """Return the trials of each round: those that may explain what the normal runs have left unexplained.

    Without the exchange: to advise fewer or smaller exchanges, or that they overlap. One rank alone, with its
    batch and with twice of it: to advise a larger batch. All else is proved by `compare --vary`.
    """
    facts, ranks = evidence.facts, normal.ranks
    causes = find_causes(evidence)
    # What the machine has taken explains nothing of what is left.
    quiet = quiet_s(evidence, causes)
    known = sum(cause.seconds for cause in causes if cause.kind not in ("exchange", *OF_THE_MACHINE))
    if quiet - known < MIN_REST * quiet:
        return []
    variants = []
    waits = max(sum(table[role].own for role in WAITING) for table in evidence.tables)
    if waits >= MIN_SHARE * quiet:
        variants.append(replace(normal, label=NO_EXCHANGE, exchange=False))
    if evidence.is_trainer_job:
        # Alone, a rank gets no more than its share of the cores: else its own threads would slow it down, too.
        share = max(1, evidence.cores // ranks)
        alone = min(facts["threads"], share) if facts["device"] == "cpu" else normal.threads
        single = replace(normal, engine="single", ranks=1, threads=alone)
        for label, factor in ((ALONE, 1), (TWICE, 2)):
            sizes = {"global_batch_size": None, "batch_size": factor * facts["batch_size"]}
            variants.append(replace(single, label=label, options=sizes))
    # Last, for if the budget is short, its stacks are known already.
    return [*variants, normal] if variants else []
