"""The trials of a diagnosis: ways to run the job, of which the differences show what each part costs."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from hvd_trainer.errors import OptionError
from hvd_trainer.jobs.all_reduce import all_reduce_trial
from hvd_trainer.measure.measured import MeasuredTrial
from hvd_trainer.measure.trials import RunRecord, Trial, TrialRunner
from hvd_trainer.tools.diagnose.causes import MIN_SHARE, OF_THE_MACHINE, find_causes, quiet_s
from hvd_trainer.tools.diagnose.evidence import ALONE, NO_EXCHANGE, NORMAL, ONE_THREAD, TWICE, Evidence, Line
from hvd_trainer.tools.diagnose.lone import mark_lone
from hvd_trainer.tools.diagnose.machine_use import MachineUse, MachineWatch, other_cores
from hvd_trainer.tools.diagnose.own_code import of_collectives
from hvd_trainer.tools.diagnose.profile import WAITING, RankProfile, merge, read_profiles
from hvd_trainer.utils.process import cpu_ids
from hvd_trainer.utils.text import plural

WARMUP_STEPS = 5
"""Steps at the beginning of each run that do not count."""
MIN_REST = 0.3
"""Fraction of a step from which it is worth other runs to explain it."""
EXCHANGE_BYTES = tuple(2**10 * 4**step for step in range(8))
"""Sizes of the exchanges that are timed: 1 kB to 16 MB."""


class Trials:
    """Runs the job in several ways, and collects what they show.

    Args:
        normal: the job as it is.
        folder: of the tool.
        budget_s: seconds that all runs together may take.
    """

    def __init__(self, normal: MeasuredTrial, folder: Path, budget_s: float) -> None:
        self.normal = normal
        self.runner = TrialRunner(folder, budget_s=budget_s, limit_option="--budget-s", resume=False)
        self._kept = folder / "log"
        shutil.rmtree(self._kept, ignore_errors=True)
        self._runs = 0
        self.figures: dict[str, list[Mapping[str, Any]]] = {}
        """by the trials' labels"""
        self.profiles: list[list[RankProfile]] = []
        """of each normal run, in rank order"""
        self._machine = MachineUse()
        self._line: Line | None = None

    @property
    def _facts(self) -> dict[str, Any]:
        """The facts of the job's work that its normal run recorded; empty if it has not ended."""
        if NORMAL not in self.figures:
            return {}
        first = self.figures[NORMAL][0]
        used = first.get("peak_memory_mb", 0.0) * 2**20 * self.normal.ranks
        return dict(first["work"]) | {"memory_share": used / psutil.virtual_memory().total}

    def evidence(self) -> Evidence:
        """Return all that is known so far."""
        facts, profiles = self._facts, merge(self.profiles)
        mark_lone(profiles)
        return Evidence(
            profiles=profiles,
            machine=replace(self._machine, other_cores=other_cores(profiles)),
            cores=len(cpu_ids()),
            is_trainer_job=any(profile.on_trainer for profile in profiles),
            facts=facts,
            runs=dict(self.figures),
            line=self._line,
        )

    def run(self, trial: MeasuredTrial, steps: int, limit_s: float | None = None) -> RunRecord:
        """Run a trial once, and keep its figures under its label; of a normal run also its stacks.

        All are sampled alike, so that what sampling costs is in each figure that is subtracted.

        Args:
            trial: to run.
            steps: that count.
            limit_s: after so many seconds it is ended; None: at the end of the budget.
        """
        is_normal = trial.label == NORMAL
        trial = replace(trial, steps=WARMUP_STEPS + steps, record={"sample_stacks": True})
        watch, profiles = MachineWatch(), []
        shutil.rmtree(self._kept, ignore_errors=True)
        try:
            run = self._run(trial, limit_s)
        finally:
            profiles = read_profiles(self._kept)
            if is_normal and profiles:
                self.profiles.append(profiles)
                self._machine = watch.end()
        if run.state == "done":
            if "step_s" not in run.figures:
                made = plural(run.figures["work"]["steps"], "step")
                raise OptionError(
                    f"The job makes {made}, and the first {WARMUP_STEPS} do not count: let it train longer"
                )
            figures = dict(run.figures) | dict(run.figures.get("typical", {}))
            if "computing_s" in figures:
                figures["compute_s"] = min(figures["computing_s"]) - figures["parts"]["data"]
            own = of_collectives(Evidence(profiles=profiles), 0.0, 0.0) if profiles else ()
            figures["collective_s"] = sum(cause.seconds for cause in own)
            figures["apart_s"] = figures["step_s"] - figures["collective_s"]
            self.figures.setdefault(trial.label, []).append(figures)
        return run

    def measure_exchanges(self) -> None:
        """Measure how long exchanges take by their size."""
        normal, sizes = self.normal, map(str, EXCHANGE_BYTES)
        trial = all_reduce_trial("exchanges", normal.engine, normal.ranks, normal.threads, "--sizes", *sizes)
        run = self._run(trial)
        if run.state == "done":
            self._line = Line.through(run.figures["seconds"])

    def _run(self, trial: Trial, limit_s: float | None = None) -> RunRecord:
        self._runs += 1  # each run is a new one
        return self.runner.run(trial, self._runs, keep=self._kept, limit_s=limit_s)


def plan_variants(evidence: Evidence, normal: MeasuredTrial) -> list[MeasuredTrial]:
    """Return the trials of each round: those that may explain what the normal runs have left unexplained."""
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
        variants.append(replace(normal, label=NO_EXCHANGE, leave_out=("exchange",)))
    if evidence.is_trainer_job:
        # Alone, a rank gets no more than its share of the cores: else its own threads would slow it down, too.
        share = max(1, evidence.cores // ranks)
        alone = min(facts["threads"], share) if facts["device"] == "cpu" else normal.threads
        single = replace(normal, engine="single", ranks=1, threads=alone)
        for label, factor in ((ALONE, 1), (TWICE, 2)):
            sizes = {"global_batch_size": None, "batch_size": factor * facts["batch_size"]}
            variants.append(replace(single, label=label, options=sizes))
        if facts["device"] == "cpu" and facts["threads"] > 1:
            variants.append(replace(normal, label=ONE_THREAD, threads=1))
    # Last, for if the budget is short, its stacks are known already.
    return [*variants, normal] if variants else []
