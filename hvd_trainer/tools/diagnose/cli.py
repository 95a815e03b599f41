"""`python -m hvd_trainer diagnose`: find out where a step's time goes, and what to change.

python -m hvd_trainer diagnose --np 2 --backend ddp -- -m hvd_trainer.mnist

The job is started as it is, while the stacks of all ranks are sampled: that shows the lines that the time goes to,
and what the machine did meanwhile. If that leaves much of a step unexplained, it is also started without
exchanging gradients, and on one rank alone with the same batch and with twice of it. The differences tell what
each part costs.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro
from annotated_types import Ge, Gt

from hvd_trainer.errors import OptionError
from hvd_trainer.measure.command import read_command
from hvd_trainer.measure.formats import check_installed
from hvd_trainer.measure.machine import Ran, busy_warning
from hvd_trainer.measure.measured import SAME_NUMBERS, MeasuredTrial
from hvd_trainer.measure.start import locked_folder
from hvd_trainer.measure.stats import MIN_ROUNDS, ratio
from hvd_trainer.measure.trials import in_rounds
from hvd_trainer.tools.diagnose.actions import Action, find_actions
from hvd_trainer.tools.diagnose.causes import find_candidates, find_causes
from hvd_trainer.tools.diagnose.evidence import NO_EXCHANGE, NORMAL
from hvd_trainer.tools.diagnose.report import Diagnosis, Tried, conclude
from hvd_trainer.tools.diagnose.speedscope import speedscope
from hvd_trainer.tools.diagnose.trials import WARMUP_STEPS, Trials, plan_variants
from hvd_trainer.utils.text import COMMAND, plural

FIRST_STEPS = 40
"""Counted steps of the first run."""
MIN_STEPS, MAX_STEPS = 10, 2000
"""Bounds of the counted steps of a run."""
RUN_S = 4.0
"""How long a run trains, about, where the budget allows it."""
MIN_SAMPLED_S = 1.5
"""Seconds of the normal run whose stacks suffice for a verdict."""
MAX_ROUNDS = 3
RUNS_FOLDER = "diagnose-runs"
"""The folder below --out in which the runs are made."""


@dataclass(frozen=True)
class Options:
    """Find out what a step's time goes to, and what to do about it.

    The job stands behind --, as it would stand behind `python`.
    """

    np: Annotated[int, Ge(2)] = 2
    """ranks"""
    backend: Literal["horovod", "ddp"] = "horovod"
    """the engine"""
    budget_s: Annotated[float, Gt(0)] = 180.0
    """seconds that all of it may take"""
    threads: Annotated[int | None, Ge(1)] = None
    """CPU threads of each rank; None: as the launcher and OMP_NUM_THREADS say"""
    attempt: Annotated[bool, tyro.conf.arg(name="try")] = False
    """run what is advised, too, beside the job as it is; beyond --budget-s"""
    out: Path = Path("runs/diagnose")
    """folder for diagnosis.html, .md and .json, and stacks.speedscope.json"""


def main(argv: Sequence[str]) -> int:
    """Run the command, and return the exit code: 0; 1 if the job failed or hung, and 130 if it was interrupted.

    Raises:
        OptionError: an option is out of its range, or the job failed before it had trained.
    """
    ran = Ran.now(f"{COMMAND} diagnose", argv)
    options, job = read_command("diagnose", Options, argv)
    check_installed()
    # Its own: in --out another tool may keep runs that it continues from.
    with locked_folder(options.out), locked_folder(options.out / RUNS_FOLDER) as folder:
        normal = MeasuredTrial(
            label=NORMAL,
            job=job,
            engine=options.backend,
            ranks=options.np,
            threads=options.threads,
            warmup_steps=WARMUP_STEPS,
        )
        trials, failure, code = Trials(normal, folder, options.budget_s), "", 130
        with until_interrupted(trials):
            failure = measure(trials, options)
            code = int(bool(failure))
        if not trials.profiles:
            raise OptionError(failure or "The job ended without a step that counts")
        diagnosis = diagnose(trials, options, failure, ran)
        if options.attempt and code == 0:
            code = 130
            with until_interrupted(trials):
                for action in diagnosis.actions:
                    if action.can_be_tried:
                        step_s = diagnosis.evidence.step_s
                        diagnosis.tried.append(try_action(trials, action, step_s, options.budget_s))
                code = 0
        report = conclude(diagnosis)
        report.show()
        stacks = folder.parent / "stacks.speedscope.json"
        stacks.write_text(json.dumps(speedscope(diagnosis.evidence.profiles, ran.command)))
        report.write(folder.parent, "diagnosis", [stacks])
    return code


@contextmanager
def until_interrupted(trials: Trials) -> Iterator[None]:
    """Let Ctrl-C end what is done inside, of which the report warns."""
    try:
        yield
    except KeyboardInterrupt:
        trials.runner.warn("interrupted: what is told is from the runs until then")


def diagnose(trials: Trials, options: Options, failure: str, ran: Ran) -> Diagnosis:
    """Return what the runs have shown.

    Args:
        failure: why the job has failed as it is; empty if it has not.
        ran: when and by which command.
    """
    evidence, job = trials.evidence(), shlex.join(trials.normal.job)
    candidates = find_candidates(evidence)
    causes = [cause for cause in candidates if cause.is_clear]
    actions = find_actions(causes, evidence)
    words = f"--np {options.np} --backend {options.backend}"
    can_try = not options.attempt and any(action.can_be_tried for action in actions)
    return Diagnosis(
        ran=ran,
        evidence=evidence,
        causes=causes,
        unclear=[cause for cause in candidates if not cause.is_clear and math.isfinite(cause.error)],
        actions=actions,
        failure=failure,
        warnings=trials.runner.warnings,
        again=[f"{COMMAND} diagnose {words} --try -- {job}"] if can_try else [],
    )


def measure(trials: Trials, options: Options) -> str:
    """Run what is worth it within the budget, and return why the job has failed; empty if it has not."""
    if text := busy_warning():
        trials.runner.warn(text)
    print(
        f"this takes {options.budget_s:g} s at most (--budget-s): {plural(options.np, 'rank')} on "
        f"{options.backend}, as they are; then, if that explains too little, with parts left out",
        flush=True,
    )
    first = trials.run(trials.normal, FIRST_STEPS)
    if first.state != "done":
        return f"The job ended early when it was run {NORMAL}: {first.why(trials.runner.folder)}."
    step_s = trials.figures[NORMAL][0]["step_s"]
    start_s = max(first.seconds - step_s * (WARMUP_STEPS + FIRST_STEPS), 1.0)
    print(f"{NORMAL}: {1000 * step_s:.2f} ms per step, and {start_s:.0f} s to start", flush=True)
    steps = steps_of(min(RUN_S, options.budget_s / 10), step_s)
    cost_s = start_s + step_s * (WARMUP_STEPS + steps)
    sampled_s = min(profile.seconds for profile in trials.profiles[0])
    if sampled_s < MIN_SAMPLED_S and cost_s < trials.runner.left_s:
        trials.run(trials.normal, steps)
    variants = plan_variants(trials.evidence(), trials.normal)
    # Another run measures the exchange itself.
    max_runs = max(0, int(trials.runner.left_s / cost_s) - 1)
    plan = [variant for _, variant in in_rounds(variants, MAX_ROUNDS)][:max_runs]
    if plan:
        what = f"{plural(len(plan), 'more run')} of {plural(WARMUP_STEPS + steps, 'step')}"
        print(f"{what}: about {len(plan) * cost_s:.0f} s", flush=True)
    for place, variant in enumerate(plan, 1):
        if trials.runner.left_s < cost_s:
            trials.runner.warn(f"{place - 1} of {plural(len(plan), 'further run')} were made: --budget-s is spent")
            break
        run = trials.run(variant, steps)
        if run.state != "done":
            trials.runner.warn(f"a run {variant.label} has failed: {run.why(trials.runner.folder)}")
        said = f"{1000 * run.figures['step_s']:.2f} ms per step" if run.state == "done" else run.note
        print(f"{place}/{len(plan)}  {variant.label}: {said}", flush=True)
    has_collectives = any(cause.kind == "collective" for cause in find_causes(trials.evidence()))
    if trials.runner.left_s > cost_s and (NO_EXCHANGE in trials.figures or has_collectives):
        trials.measure_exchanges()
    return ""


def steps_of(seconds: float, step_s: float) -> int:
    """Return how many steps of a run are counted that trains for about so many seconds."""
    return min(MAX_STEPS, max(MIN_STEPS, round(seconds / step_s)))


def try_action(trials: Trials, action: Action, step_s: float, limit_s: float) -> Tried:
    """Run the job with an action and without it, in rounds, and return the ratio of the speeds.

    Args:
        limit_s: after so many seconds a run is ended.
    """
    on_trainer = trials.evidence().is_trainer_job
    before = replace(trials.normal, label=f"without {action.title}")
    after = replace(
        trials.normal,
        label=f"with {action.title}",
        threads=action.threads or trials.normal.threads,
        options=action.settings if on_trainer else {},
        run_options=SAME_NUMBERS if on_trainer else (*SAME_NUMBERS, *action.words),
    )
    steps = steps_of(RUN_S, step_s)
    print(f"{plural(2 * MIN_ROUNDS, 'run')} of the job with {action.title} and without it", flush=True)
    speeds: dict[str, list[float]] = {before.label: [], after.label: []}
    for _, variant in in_rounds((before, after), MIN_ROUNDS):
        factor = action.batch_factor if variant is after else 1
        run = trials.run(variant, max(MIN_STEPS, steps // factor), limit_s=limit_s)
        if run.state != "done":
            return Tried(action, None, f"the job did not run {variant.label}: {run.note}")
        speeds[variant.label].append(run.figures.get("samples_per_s", factor / run.figures["step_s"]))
    return Tried(action, ratio(speeds[after.label], speeds[before.label]))
