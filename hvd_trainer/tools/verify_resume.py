"""Run `python -m hvd_trainer verify-resume`: kill a training again and again, and prove that nothing was lost.

A script is killed, started again with the same words, and its weights are compared in the end. It saves and
resumes by its own means: in its working folder, or in the folder that stands as {folder} among its words. The run
that is killed has others than the undisturbed run.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

from hvd_trainer.config.checks import Count
from hvd_trainer.errors import LaunchError, OptionError
from hvd_trainer.measure.command import read_command
from hvd_trainer.measure.failure_reason import why_no_step
from hvd_trainer.measure.figures import RANKS_DIFFER, read_figures
from hvd_trainer.measure.formats import check_installed
from hvd_trainer.measure.machine import Ran
from hvd_trainer.measure.measured import SAME_NUMBERS, SAME_SUMS, MeasuredTrial
from hvd_trainer.measure.own_files import describe_outside, in_own_folder, written_outside
from hvd_trainer.measure.recorders import MARK
from hvd_trainer.measure.report import Bar, Bars, Report, Table, Verdict
from hvd_trainer.measure.start import Start, find_processes, launched, run_to_end
from hvd_trainer.measure.steps import FIRST_STEP
from hvd_trainer.measure.tool_folder import locked_folder
from hvd_trainer.utils.text import COMMAND, plural

TWO_RANKS = (
    "two ranks cannot show the order in which values are added (a + b = b + a): if the job has more, type -np 3"
)
ORDER_OF_SUMS = (
    f"in both runs each gradient of a script was a message of its own (`{COMMAND} run {' '.join(SAME_SUMS)}`); "
    "without, three ranks or more add values in another order after a resume. A job on the Trainer needs no option"
)
END_S, AFTER_KILL_S, SETTLE_S, POLL_S = 3600.0, 180.0, 45.0, 0.005


@dataclass(frozen=True)
class Options:
    """Kill a training again and again, and prove that nothing was lost.

    The script behind -- runs once undisturbed. Then it runs again, and ranks and the launcher are killed after
    random numbers of steps; after each kill the same command continues. In the end both must have trained the same
    weights, to the last bit. Each of the two has a working folder of its own; where the script is told its
    checkpoint, write {folder}: a job that is built on the Trainer needs --log-dir {folder}/log --resume auto.

    Exit codes: 0 nothing was lost, 1 something was, 2 a mistake, or a run failed.
    """

    kills: Count = 12
    """how many"""
    backend: Literal["horovod", "ddp"] = "horovod"
    """the engine"""
    np: Count = 3
    """ranks, as many as the job has; two cannot show the order of sums"""
    seed: int = 0
    """of moments and victims"""
    keep: bool = False
    """keep the folder of both runs"""
    out: Path = Path("runs/verify-resume")
    """folder for resume.html, .md and .json"""


class Killed(NamedTuple):
    """What followed a start that was killed."""

    victim: str
    steps: int
    """after which it was killed"""
    first_step_s: float
    """from the start to the end of its first step"""
    left: int
    """processes that have outlived the launcher by some seconds, and the launcher, if it did not end"""


@dataclass(frozen=True)
class Script:
    """A script, and what it runs on."""

    job: Sequence[str]
    engine: str
    ranks: int

    def start(self, place: Path, hold: tuple[int, int] | None = None) -> Start:
        """Return how it is started in `place`, that of one start in the run's.

        Args:
            hold: which rank is held, to be killed, after how many steps.
        """
        place.mkdir(parents=True)
        trial = MeasuredTrial(
            job=self.job,
            engine=self.engine,
            ranks=self.ranks,
            run_options=(*SAME_NUMBERS, *SAME_SUMS),
            endless=False,
            record={"hold": hold},
        )
        return in_own_folder(trial.start(place), place.parent)

    def finish(self, place: Path) -> tuple[dict[str, Any], float]:
        """Run it to its end in `place`.

        Returns:
            Its figures, and the seconds from the start to the end of the first step.

        Raises:
            LaunchError: it fails, or takes no step.
        """
        began = time.time()
        code = run_to_end(self.start(place), place, place / "output", limit_s=END_S)
        if code != 0:
            raise _error(f"had not ended after {END_S:g} s" if code is None else f"ended with code {code}", place)
        for path in written_outside(place.parent):
            print(f"warning: {describe_outside(path)}", file=sys.stderr, flush=True)
        figures = read_figures(place, self.ranks, warmup_steps=0)
        if figures is None:
            raise _error(f"took no step{why_no_step(place.parent, place)}", place)
        return figures, (place / FIRST_STEP).stat().st_mtime - began

    def kill(self, place: Path, rank: int, steps: int, *, launcher: bool) -> Killed:
        """Start it in `place`, and kill a rank, or the launcher, after so many steps.

        Raises:
            LaunchError: it does not come to this step.
        """
        began, mark = time.time(), place / MARK
        with launched(self.start(place, (rank, steps)), place, place / "output") as process:
            while not mark.exists():
                if time.time() > began + END_S or process.poll() is not None:
                    late = "ended before the kill, or hangs: let it train longer, or type fewer --kills"
                    raise _error(late, place)
                time.sleep(POLL_S)
            with suppress(ProcessLookupError):
                os.kill(process.pid if launcher else int(mark.read_text()), signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                process.wait(AFTER_KILL_S)
            deadline = time.monotonic() + SETTLE_S
            while left := {other.pid for other in find_processes(place)} - {process.pid}:
                if time.monotonic() > deadline:
                    break
                time.sleep(POLL_S)
            victim = "the launcher" if launcher else f"rank {rank}"
            first_step_s = (place / FIRST_STEP).stat().st_mtime - began
            return Killed(victim, steps, first_step_s, len(left) + (process.poll() is None))


def _error(what: str, place: Path) -> LaunchError:
    return LaunchError(f"The job {what}:\n{(place / 'output').read_text(errors='replace')[-2000:]}")


class Campaign(NamedTuple):
    """What the undisturbed run and the killed one have shown."""

    kills: Sequence[Killed]
    recoveries_s: Sequence[float]
    """from each start after a kill to the end of its first step"""
    last_steps: int
    """that were left after the last kill"""
    same: bool
    """whether both have trained the same weights"""
    ranks: int

    def report(self, ran: Ran) -> Report:
        """Return what it proves."""
        after = f"After {plural(len(self.kills), 'kill')} the final weights are"
        verdict = Verdict(f"{after} the same, to the last bit.", "sure", badge="NOTHING LOST")
        if not self.same:
            verdict = Verdict(f"{after} not those of the undisturbed run.", "failed", badge="OTHER WEIGHTS")
        verdicts, left = [verdict], plural(sum(killed.left for killed in self.kills), "process", "processes")
        if any(killed.left for killed in self.kills):
            text = f"Ranks or launchers outlived a kill: {left} left behind."
            verdicts.append(Verdict(text, "failed", badge=f"{left} LEFT".upper()))
        seconds = [self.kills[0].first_step_s, *self.recoveries_s]
        starts = [(killed.steps, f"{killed.victim} killed", str(killed.left)) for killed in self.kills]
        starts.append((self.last_steps, "the end", ""))
        rows = [
            (str(number), str(steps), f"{first_s:.1f}", end, others)
            for number, (first_s, (steps, end, others)) in enumerate(zip(seconds, starts, strict=True), 1)
        ]
        return Report(
            ran=ran,
            verdicts=verdicts,
            bars=Bars(
                "Steps of each start",
                "Each start resumes from what the one before has saved, and makes the steps since then again.",
                [
                    Bar(f"start {number}", [("a rank killed" if end.startswith("rank") else end, steps)])
                    for number, (steps, end, _) in enumerate(starts, 1)
                ],
                "steps",
                ["a rank killed", "the launcher killed", "the end"],
            ),
            tables=[
                Table("Each start", ("start", "steps", "s to its first step", "end", "left"), rows, words=(3,))
            ],
            notes=[
                f"after the last kill: {plural(self.last_steps, 'step')} to the end",
                f"recovery, from a start to its first step: median {median(self.recoveries_s):.1f} s, "
                f"maximum {max(self.recoveries_s):.1f} s",
                TWO_RANKS if self.ranks == 2 else ORDER_OF_SUMS,
            ],
        )


def verify(script: Script, *, kills: int, draw: random.Random, folder: Path) -> Campaign:
    """Run a script undisturbed and with kills, and print each kill.

    Raises:
        LaunchError: the script fails without a kill, or does not resume.
        OptionError: it makes fewer steps than there are kills.
    """
    undisturbed, _ = script.finish(folder / "undisturbed" / "start-1")
    steps = undisturbed["work"]["steps"]
    print(f"undisturbed: {plural(steps, 'step')} of {script.ranks} ranks on {script.engine}", flush=True)
    limit = steps // (kills + 1)  # of each start, so that some are left for the last one
    if limit < 1:
        raise OptionError(f"--kills {kills}: the script makes {plural(steps, 'step')} only")
    at_launcher = [number % 2 == 1 for number in range(kills)]
    draw.shuffle(at_launcher)
    killed = []
    for number, launcher in enumerate(at_launcher, 1):
        rank, step = draw.randrange(script.ranks), draw.randrange((limit + 1) // 2, limit + 1)
        killed.append(script.kill(folder / "killed" / f"start-{number}", rank, step, launcher=launcher))
        print(f"kill {number}: {killed[-1].victim}, {plural(step, 'step')} after the start", flush=True)
    disturbed, last_s = script.finish(folder / "killed" / f"start-{kills + 1}")
    again = disturbed["work"]["steps"]
    if again >= steps:
        raise LaunchError(
            f"The script does not resume: started again after {plural(kills, 'kill')}, it made all "
            f"{plural(steps, 'step')} again. Let it save every {plural((limit + 1) // 2, 'step')} at least (or "
            f"train longer, or type fewer --kills), and load at its start what it has saved"
        )
    same = disturbed["weights"] == undisturbed["weights"] != RANKS_DIFFER
    return Campaign(killed, [*(run.first_step_s for run in killed[1:]), last_s], again, same, script.ranks)


def main(argv: Sequence[str]) -> int:
    """Run the command, and return the exit code: 0 if nothing was lost, else 1.

    Raises:
        OptionError: an option is out of its range, or there is no job.
        LaunchError: the script fails without a kill, or does not resume.
    """
    ran = Ran.now(f"{COMMAND} verify-resume", argv)
    options, job = read_command("verify-resume", Options, argv)
    check_installed("jinja2", "rich")
    script = Script(job, options.backend, options.np)
    with locked_folder(options.out, "verify-resume") as out:
        folder = Path(tempfile.mkdtemp(prefix="hvd_trainer-verify-"))
        try:
            campaign = verify(script, kills=options.kills, draw=random.Random(options.seed), folder=folder)
            report = campaign.report(ran)
            report.show()
            report.write(out, "resume")
            return int(report.has_failed)
        finally:
            if options.keep:
                print(f"both runs are in {folder}")
            else:
                shutil.rmtree(folder, ignore_errors=True)
