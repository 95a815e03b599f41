"""`python -m hvd_trainer diagnose`: find out where a step's time goes, and what to change.

python -m hvd_trainer diagnose --np 2 --backend ddp -- -m hvd_trainer.mnist

The job is started as it is, while the stacks of all ranks are sampled: that shows the lines that the time goes to,
and what the machine did meanwhile. If that leaves much of a step unexplained, it is also started without
exchanging gradients, and on one rank alone with the same batch and with twice of it. The differences tell what
each part costs.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import psutil
import tyro
from annotated_types import Ge, Gt

from hvd_trainer.errors import OptionError
from hvd_trainer.tools.diagnose.actions import Action, find_actions
from hvd_trainer.tools.diagnose.causes import (
    ALONE,
    MIN_SHARE,
    NO_EXCHANGE,
    NORMAL,
    ONE_THREAD,
    TWICE,
    Evidence,
    Line,
    find_causes,
)
from hvd_trainer.tools.diagnose.flame_graph import render, speedscope
from hvd_trainer.tools.diagnose.machine_use import MachineUse, MachineWatch
from hvd_trainer.tools.diagnose.profile import RankProfile, merge, read_profiles
from hvd_trainer.tools.diagnose.report import Report, as_json, sentences, show, show_tried
from hvd_trainer.tools.doctor import all_reduce
from hvd_trainer.tools.runner.command import LAUNCHER_OF, NOT_SAVED, command_for, read_command
from hvd_trainer.tools.runner.formats import check_installed
from hvd_trainer.tools.runner.job_kind import is_trainer_job
from hvd_trainer.tools.runner.machine import warn_if_busy
from hvd_trainer.tools.runner.measured import Start, measured_start, read_measured
from hvd_trainer.tools.runner.runs import RunRecord, in_rounds, locked_folder, log_dir
from hvd_trainer.tools.runner.step_stats import medians
from hvd_trainer.tools.runner.trial_runner import run_once
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
MIN_REST = 0.3
"""Fraction of a step from which it is worth other runs to explain it."""
MAX_ROUNDS = 3
EXCHANGE_BYTES = tuple(2**10 * 4**step for step in range(8))
"""Sizes of the exchanges that are timed: 1 kB to 16 MB."""


@dataclass(frozen=True)
class Options:
    """Find out what a step's time goes to, and what to do about it.

    The job stands behind --, as it would stand behind `python`.
    """

    np: Annotated[int, Ge(2)] = 2
    """ranks"""
    backend: Literal["horovod", "ddp"] = "horovod"
    """the engine"""
    budget: Annotated[float, Gt(0)] = 180.0
    """seconds that all of it may take"""
    threads: Annotated[int | None, Ge(1)] = None
    """CPU threads of each rank; None: as the launcher and OMP_NUM_THREADS say"""
    attempt: Annotated[bool, tyro.conf.arg(name="try")] = False
    """run what is advised, too, beside the job as it is; beyond the budget"""
    out: Path = Path("runs/diagnose")
    """folder for diagnosis.json, diagnosis.html and stacks.speedscope.json"""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A way to run the job."""

    name: str
    ranks: int
    threads: int | None = None
    options: tuple[str, ...] = ()
    """further options of a Trainer job"""
    leave_out: tuple[Literal["exchange", "data"], ...] = ()


@dataclass
class Collected:
    """The results of the runs so far."""

    is_trainer_job: bool
    figures: dict[str, list[Mapping[str, Any]]] = field(default_factory=dict)
    """by the trials' names"""
    profiles: list[list[RankProfile]] = field(default_factory=list)
    """of each normal run, in rank order"""
    machine: MachineUse = field(default_factory=MachineUse)
    """beside the last normal run"""
    line: Line | None = None
    note: str = ""
    """why the diagnosis ended early"""

    @property
    def facts(self) -> dict[str, Any]:
        """The facts of the job's work that its normal run recorded; empty if it has not ended."""
        runs = self.figures.get(NORMAL, ())
        if not runs:
            return {}
        memory = psutil.virtual_memory()
        used = runs[0].get("peak_memory_mb", 0.0) * 2**20 * max(1, len(self.profiles[0]))
        return dict(runs[0]["work"]) | {"memory_share": used / memory.total}

    def evidence(self) -> Evidence:
        """Return all of it, for the functions that find causes."""
        return Evidence(
            profiles=merge(self.profiles),
            machine=self.machine,
            cores=len(cpu_ids()),
            is_trainer_job=self.is_trainer_job,
            facts=self.facts,
            runs=self.figures,
            line=self.line,
        )


class BudgetedRunner:
    """Runs the trials of a job, one after the other, and collects what they show.

    Args:
        job: the words behind `python`.
        options: of the tool.
        folder: of the tool.
    """

    def __init__(self, job: tuple[str, ...], options: Options, folder: Path) -> None:
        self.job, self._options, self._folder = job, options, folder
        self._deadline = time.monotonic() + options.budget
        self.is_trainer_job = is_trainer_job(job)
        self.collected = Collected(self.is_trainer_job)

    @property
    def left_s(self) -> float:
        """Seconds that are left of the budget."""
        return self._deadline - time.monotonic()

    def normal(self) -> Trial:
        return Trial(name=NORMAL, ranks=self._options.np, threads=self._options.threads)

    def run(self, trial: Trial, steps: int, limit_s: float | None = None) -> RunRecord:
        """Run a trial once, and keep its figures under its name; of a normal run also its stacks.

        Args:
            trial: to run.
            steps: that count.
            limit_s: after so many seconds it is ended; None: at the end of the budget.
        """
        engine = self._options.backend if trial.ranks > 1 else "single"
        is_normal = trial.name == NORMAL
        further = ("--sample-stacks",) if is_normal and self.is_trainer_job else ()
        start = measured_start(
            self.job,
            engine=engine,
            ranks=trial.ranks,
            log=log_dir(self._folder),
            steps=WARMUP_STEPS + steps,
            leave_out=trial.leave_out,
            options=(*NOT_SAVED, *trial.options, *further) if self.is_trainer_job else (),
            sample_stacks=is_normal,
        )
        read = partial(read_measured, job=self.job, ranks=trial.ranks, warmup_steps=WARMUP_STEPS)
        watch = MachineWatch() if is_normal else None
        try:
            run = self._run_once(trial, start, read, limit_s)
        finally:
            if watch is not None:
                self._keep(watch)
        if run.state == "done":
            figures = dict(run.figures) | dict(run.figures.get("typical", {}))
            if "computing_s" in figures:
                figures["compute_s"] = min(figures["computing_s"]) - figures["parts"]["data"]
            self.collected.figures.setdefault(trial.name, []).append(figures)
        return run

    def _keep(self, watch: MachineWatch) -> None:
        profiles = read_profiles(self._kept)
        if profiles:
            self.collected.profiles.append(profiles)
            self.collected.machine = watch.end()

    @property
    def _kept(self) -> Path:
        return self._folder / "log"

    def measure_exchanges(self) -> None:
        """Measure how long exchanges take by their size."""
        job = [*all_reduce.JOB, "--backend", self._options.backend]
        job += ["--log-dir", str(log_dir(self._folder)), "--sizes", *map(str, EXCHANGE_BYTES)]
        trial = Trial(name="exchanges", ranks=self._options.np, threads=self._options.threads)
        command = command_for(LAUNCHER_OF[self._options.backend], trial.ranks, job)
        run = self._run_once(trial, Start(command, {}), all_reduce.read_result, None)
        if run.state == "done":
            self.collected.line = Line.through(run.figures["seconds"])

    def _run_once(self, trial: Trial, start: Start, read: Any, limit_s: float | None) -> RunRecord:
        return run_once(
            start.command,
            self._folder,
            {"trial": trial.name},
            1,
            threads=trial.threads,
            limit_s=max(self.left_s, 1.0) if limit_s is None else limit_s,
            read=read,
            variables=start.variables,
            keep=self._kept if trial.name == NORMAL else None,
        )


def main(argv: Sequence[str]) -> int:
    """Run the command, and return the exit code: 0; 1 if the job failed or hung, and 130 if it was interrupted.

    Raises:
        OptionError: an option is out of its range, or the job failed before it had trained.
    """
    options, job = read_command("diagnose", Options, argv)
    check_installed()
    folder = options.out.expanduser().resolve()
    with locked_folder(folder):
        runner = BudgetedRunner(job, options, folder)
        try:
            code = measure(runner, options)
        except KeyboardInterrupt:
            runner.collected.note = "Interrupted."
            code = 130
        if not runner.collected.profiles:
            raise OptionError(runner.collected.note or "The job ended without a step that counts")
        conclude(runner, options, folder)
    return code


def measure(runner: BudgetedRunner, options: Options) -> int:
    """Run the trials that are worth it within the budget, and return the exit code."""
    warn_if_busy()
    print(
        f"this takes {options.budget:g} s at most (--budget): {plural(options.np, 'rank')} on {options.backend}, "
        f"as they are; then, if that explains too little, with parts left out",
        flush=True,
    )
    collected = runner.collected
    first = runner.run(runner.normal(), FIRST_STEPS)
    if first.state != "done":
        collected.note = f"The job ended early when it was run {NORMAL}: {first.why(options.out)}."
        return 1
    step_s = collected.figures[NORMAL][0]["step_s"]
    start_s = max(first.seconds - step_s * (WARMUP_STEPS + FIRST_STEPS), 1.0)
    print(f"{NORMAL}: {1000 * step_s:.2f} ms per step, and {start_s:.0f} s to start", flush=True)
    run_s = min(RUN_S, options.budget / 10)
    steps = min(MAX_STEPS, max(MIN_STEPS, round(run_s / step_s)))
    cost_s = start_s + step_s * (WARMUP_STEPS + steps)
    sampled_s = min(profile.seconds for profile in collected.profiles[0])
    if sampled_s < MIN_SAMPLED_S and cost_s < runner.left_s:
        runner.run(runner.normal(), steps)
    trials = plan_trials(collected.evidence(), options)
    # Another run measures the exchange itself.
    plan = [trial for _, trial in in_rounds(trials, MAX_ROUNDS)][: max(0, int(runner.left_s / cost_s) - 1)]
    if not plan:
        return 0
    count = len(plan)
    print(f"{plural(count, 'more run')} of {plural(WARMUP_STEPS + steps, 'step')}: about {count * cost_s:.0f} s")
    for place, trial in enumerate(plan, 1):
        if runner.left_s < cost_s:
            collected.note = "The budget (--budget) is spent."
            return 0
        run = runner.run(trial, steps)
        said = f"{1000 * run.figures['step_s']:.2f} ms per step" if run.state == "done" else run.note
        print(f"{place}/{count}  {trial.name}: {said}", flush=True)
    if runner.left_s > cost_s and NO_EXCHANGE in collected.figures:
        runner.measure_exchanges()
    return 0


def plan_trials(evidence: Evidence, options: Options) -> list[Trial]:
    """Return the trials of each round: those that may explain what the normal runs have left unexplained.

    Args:
        evidence: of the normal runs.
        options: of the tool.
    """
    facts, step_s = evidence.facts, evidence.step_s
    rest = step_s - sum(cause.seconds for cause in find_causes(evidence) if cause.kind != "exchange")
    if rest < MIN_REST * step_s:
        return []
    trials = []
    exchange = max(profile.roles()["exchange"].own for profile in evidence.profiles)
    if exchange >= MIN_SHARE * step_s:
        trials.append(Trial(name=NO_EXCHANGE, ranks=options.np, threads=options.threads, leave_out=("exchange",)))
    if evidence.is_trainer_job:
        # Alone, a rank gets no more than its share of the cores: else its own threads would slow it down, too.
        share = max(1, evidence.cores // options.np)
        alone = min(facts["threads"], share) if facts["device"] == "cpu" else options.threads
        whole = ("--global-batch-size", "None", "--batch-size")
        batch = facts["batch_size"]
        trials.append(Trial(name=ALONE, ranks=1, threads=alone, options=(*whole, str(batch))))
        trials.append(Trial(name=TWICE, ranks=1, threads=alone, options=(*whole, str(2 * batch))))
        if facts["device"] == "cpu" and facts["threads"] > 1:
            trials.append(Trial(name=ONE_THREAD, ranks=options.np, threads=1))
    # Last, for if the budget is short, its stacks are known already.
    return [*trials, Trial(name=NORMAL, ranks=options.np, threads=options.threads)] if trials else []


def conclude(runner: BudgetedRunner, options: Options, folder: Path) -> None:
    """Print the report, try what it advises if asked to, and write the files."""
    collected = runner.collected
    evidence = collected.evidence()
    causes = find_causes(evidence)
    advice = find_actions(causes, evidence)
    report = Report(evidence=evidence, causes=causes, advice=advice, backend=options.backend, note=collected.note)
    show(report)
    tried = try_actions(runner, options, advice, evidence.step_s) if options.attempt else []
    show_tried(tried)
    heading = f"{plural(options.np, 'rank')} on {options.backend}: {shlex.join(runner.job)}"
    files = {
        "diagnosis.json": json.dumps(as_json(report, tried), indent=1) + "\n",
        "diagnosis.html": render(evidence.profiles, heading, sentences(report)),
        "stacks.speedscope.json": json.dumps(speedscope(evidence.profiles, heading)),
    }
    for name, text in files.items():
        (folder / name).write_text(text)
    print(f"written: {', '.join(str(folder / name) for name in files)}")


def try_actions(
    runner: BudgetedRunner, options: Options, advice: Sequence[Action], step_s: float
) -> list[tuple[Action, float, float]]:
    """Run each action beside the unchanged job, and return it with the samples per second before and after."""
    tried = []
    steps = min(MAX_STEPS, max(MIN_STEPS, round(RUN_S / step_s)))
    figures = runner.collected.figures
    for action in (action for action in advice if action.can_be_tried):
        before = Trial(name="before", ranks=options.np, threads=options.threads)
        after = Trial(
            name=f"after: {action.text.partition(':')[0]}",
            ranks=options.np,
            threads=action.threads or options.threads,
            options=action.words,
        )
        figures.pop(before.name, None)
        for _, trial in in_rounds((before, after), 2):
            count = max(MIN_STEPS, steps // action.batch_factor) if trial is after else steps
            runner.run(trial, count, limit_s=options.budget)
        if before.name in figures and after.name in figures:
            rates = [medians(figures[trial.name])["samples_per_s"] for trial in (before, after)]
            tried.append((action, rates[0], rates[1]))
    return tried
