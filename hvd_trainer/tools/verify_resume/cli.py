"""Run `python -m hvd_trainer verify-resume`: kill a training again and again, and prove that nothing was lost.

A script is killed, started again with the same words, and its weights are compared in the end. It saves and
resumes by its own means: in its working folder, or in the folder that stands as {folder} among its words. The run
that is killed has others than the undisturbed run.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from hvd_trainer.errors import LaunchError, OptionError
from hvd_trainer.launch.engine import choose_engine
from hvd_trainer.measure.command import read_command
from hvd_trainer.measure.failure_reason import why_no_figures
from hvd_trainer.measure.figures import read_steps
from hvd_trainer.measure.formats import check_installed
from hvd_trainer.measure.machine import Ran
from hvd_trainer.measure.measured import SAME_NUMBERS, SAME_SUMS, MeasuredTrial
from hvd_trainer.measure.save_kill import Saves
from hvd_trainer.measure.steps import FIRST_STEP
from hvd_trainer.measure.tool_folder import locked_folder, make_inner, remove_inner
from hvd_trainer.measure.trials import RunRecord, TrialRunner
from hvd_trainer.tools.verify_resume.kills import END_S, Kill, Killed, Who
from hvd_trainer.tools.verify_resume.options import Options
from hvd_trainer.tools.verify_resume.report import Campaign
from hvd_trainer.utils.text import COMMAND, plural

FEWER = "let it train longer, or type fewer --kills"
MAX_FRACTION = 0.9
"""Fraction of a file's usual size that is written before the kill, at most."""
PLACES = ("undisturbed", "killed")
"""Folders of the two runs inside the tool's."""


@dataclass(frozen=True, kw_only=True)
class ResumedTrial(MeasuredTrial):
    """A start of a script, whose figures have the final weights of each rank."""

    run_options: Sequence[str] = (*SAME_NUMBERS, *SAME_SUMS)
    endless: bool = False

    def read(self, log: Path) -> dict[str, Any]:
        """Return the figures of a start that came to its end.

        Raises:
            LaunchError: it took no step.
        """
        figures = super().read(log)
        if figures is None:
            raise LaunchError(f"Nothing was left to train ({why_no_figures(log.parent)}): {FEWER}")
        return {**figures, "weights": [str(rank["weights"]) for rank in read_steps(log)]}


def run_in(place: str, trial: ResumedTrial, runner: TrialRunner, kill: Kill | None = None) -> RunRecord:
    """Start a script in one of `PLACES`, and let it run to its end or until it is killed.

    Raises:
        LaunchError: it comes to its end without a step, or before the kill; or it fails, but not as a start does
            that finds no whole checkpoint.
    """
    folder, number = make_inner(runner.folder / place), len(runner.last) + 1  # each start is a new run
    if kill is None:
        run = runner.run(trial, number, place=folder)
    else:
        strike = partial(kill.strike, Saves(folder), folder, runner.folder)
        trial = replace(trial, record={"stop_at": kill.stop_at})
        run = runner.run(trial, number, place=folder, disturb=strike)
        if run.state == "done":
            raise LaunchError(f"The job ended before the kill: {FEWER}")
    # No kill came before the undisturbed run, nor before the first start of the other one.
    has_begun = number <= 2 or (folder / "log" / FIRST_STEP).exists()
    if run.state != "done" and not run.figures and (run.state == "killed" or has_begun):
        raise LaunchError(f"The job failed: {run.why(runner.folder)}")
    return run


def first_step_s(run: RunRecord) -> float:
    """Return the seconds from the start of a run to the end of its first step."""
    return float(run.figures["first_step_at"]) - run.began_at


def verify(trial: ResumedTrial, runner: TrialRunner, *, kills: int, draw: random.Random) -> Campaign:
    """Run a script undisturbed and with kills, and print each kill.

    Raises:
        LaunchError: the script fails without a kill, or does not resume.
        OptionError: it makes fewer steps than there are kills.
    """
    ranks = f"{plural(trial.ranks, 'rank')} on {trial.engine}"
    print(
        f"one run of {ranks} without a kill, then {plural(kills + 1, 'start')} with {plural(kills, 'kill')}: "
        f"about 2.5 times as long as one run, and {plural(kills, 'start')} more. The first run tells the seconds",
        flush=True,
    )
    began = time.monotonic()
    undisturbed = run_in("undisturbed", trial, runner)
    steps, run_s = undisturbed.figures["work"]["steps"], time.monotonic() - began
    # The steps are made once or twice in all, and each start takes as long as this one's.
    left_s = kills * first_step_s(undisturbed) + 1.5 * run_s
    print(f"undisturbed: {plural(steps, 'step')} of {ranks}, {run_s:.0f} s; about {left_s:.0f} s left", flush=True)
    limit = steps // (kills + 1)  # of each start, so that some are left for the last one
    if limit < 1:
        raise OptionError(f"--kills {kills}: the script makes {plural(steps, 'step')} only")
    saves = (kills + 2) // 3
    plan: list[Who] = ["save"] * saves
    plan += ["rank" if number % 2 else "launcher" for number in range(kills - saves)]
    draw.shuffle(plan)
    killed: list[Killed] = []
    weights, step_s = undisturbed.figures["weights"], undisturbed.figures["step_s"]
    campaign = Campaign(killed, trial.ranks, len({*weights}) > 1, runner.warnings)
    for number, who in enumerate(plan, 1):
        rank, step = draw.randrange(trial.ranks), draw.randrange((limit + 3) // 4, (limit + 1) // 2 + 1)
        moment = draw.uniform(0, MAX_FRACTION if who == "save" else min(2, limit / 2) * step_s)
        run = run_in("killed", trial, runner, Kill(who, rank, step, moment))
        if not run.figures:
            return replace(campaign, failure=run.note)
        killed.append(Killed(**run.figures))
        print(f"kill {number}: {killed[-1]}, {plural(step, 'step')} or more after the start", flush=True)
    last = run_in("killed", trial, runner)
    if not last.figures:
        return replace(campaign, failure=last.note)
    last_steps = last.figures["work"]["steps"]
    if last_steps >= steps:
        raise LaunchError(
            f"The script does not resume: started again after {plural(kills, 'kill')}, it made all "
            f"{plural(steps, 'step')} again. Let it save every {plural((limit + 3) // 4, 'step')} at least (or "
            f"train longer, or type fewer --kills), and load at its start what it has saved"
        )
    same = last.figures["weights"] == weights
    return replace(campaign, last_steps=last_steps, last_s=first_step_s(last), same=same)


def main(argv: Sequence[str]) -> int:
    """Run the command, and return the exit code: 0 if nothing was lost, else 1.

    Raises:
        OptionError: an option is out of its range, or there is no job.
        LaunchError: the script fails without a kill, or does not resume.
    """
    ran = Ran.now(f"{COMMAND} verify-resume", argv)
    options, job = read_command("verify-resume", Options, argv)
    check_installed("jinja2", "rich")
    trial = ResumedTrial(job=job, engine=choose_engine(options.backend, os.environ), ranks=options.np)
    with locked_folder(options.out, "verify-resume") as folder:
        places = [folder / name for name in PLACES]
        runner = TrialRunner(folder, limit_s=END_S, limit_option="the limit of each start", resume=False)
        for place in places:
            remove_inner(place)  # of an earlier command
        try:
            report = verify(trial, runner, kills=options.kills, draw=random.Random(options.seed)).report(ran)
            report.show(runner.warnings)
            report.write(folder, "resume")
            return int(report.has_failed)
        finally:
            if options.keep:
                print(f"both runs are in {' and '.join(map(str, places))}")
            else:
                for place in places:
                    remove_inner(place)
