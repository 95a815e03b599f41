"""Run `python -m hvd_trainer verify-resume`: kill a training again and again, and prove that nothing was lost.

A script is killed, started again with the same words, and its weights are compared in the end. It saves and
resumes by its own means: in its working folder, or in the folder that stands as {folder} among its words. The run
that is killed has others than the undisturbed run. A rank stops after a random number of steps; from there on

    a rank, the launcher    is killed after a random time
    a save                  is waited for, for as many steps again: the process that saves ends inside it by itself
                            (`measure/save_kill.py`)
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
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Literal, NamedTuple, TypeVar

import psutil

from hvd_trainer.errors import LaunchError, OptionError
from hvd_trainer.launch.engine import choose_engine
from hvd_trainer.launch.world import detect
from hvd_trainer.measure.command import read_command
from hvd_trainer.measure.failure_reason import why_it_failed, why_no_step
from hvd_trainer.measure.figures import read_figures, read_steps
from hvd_trainer.measure.formats import check_installed
from hvd_trainer.measure.machine import Ran
from hvd_trainer.measure.measured import SAME_NUMBERS, SAME_SUMS, MeasuredTrial
from hvd_trainer.measure.own_files import describe_outside, in_own_folder, written_outside
from hvd_trainer.measure.recorders import MARK
from hvd_trainer.measure.report import Bar, Bars, Report, Table, Verdict
from hvd_trainer.measure.save_kill import Saves
from hvd_trainer.measure.start import Start, find_processes, launched, run_to_end
from hvd_trainer.measure.steps import FIRST_STEP
from hvd_trainer.measure.tool_folder import locked_folder
from hvd_trainer.tools.verify_resume.options import Options
from hvd_trainer.utils.text import COMMAND, plural

TWO_RANKS = (
    "two ranks cannot show the order in which values are added (a + b = b + a): if the job has more, type -np 3"
)
ORDER_OF_SUMS = (
    f"in both runs each gradient of a script was a message of its own (`{COMMAND} run {' '.join(SAME_SUMS)}`); "
    "without, three ranks or more add values in another order after a resume. A job on the Trainer needs no option"
)
RANKS_APART = (
    "in the undisturbed run, too, ranks end with other weights than each other: the script may not exchange "
    "gradients. Each rank was compared with itself"
)
FEWER = "let it train longer, or type fewer --kills"
T = TypeVar("T")
Who = Literal["rank", "launcher", "save"]
END_S, AFTER_KILL_S, SETTLE_S, POLL_S, SAVE_S = 3600.0, 180.0, 45.0, 0.005, 20.0
MAX_FRACTION = 0.9
"""Fraction of a file's usual size that is written before the kill, at most."""


class Killed(NamedTuple):
    """What followed a start that was killed."""

    victim: str
    steps: int
    """at least, before it was killed"""
    first_step_s: float
    """from the start to the end of its first step"""
    left: int
    """processes that have outlived the launcher by some seconds, and the launcher, if it did not end"""
    saving: str = ""
    """the file that it was writing; empty if it was no save"""

    def __str__(self) -> str:
        return f"{self.victim} killed" + (f" inside a save of {self.saving}" if self.saving else "")


class Finished(NamedTuple):
    """A start that came to its end."""

    steps: int
    step_s: float
    weights: Sequence[str]
    """digests of the final weights, in rank order"""
    first_step_s: float
    """as in `Killed`"""


class NothingLeftError(LaunchError):
    """A start has come to its end where it should not have, as nothing was left to train."""


@dataclass(frozen=True)
class Script:
    """A script, and what it runs on."""

    job: Sequence[str]
    engine: str
    ranks: int

    def start(self, place: Path, *stop_at: int) -> Start:
        """Return how it is started in `place`, that of one start in the run's.

        Args:
            stop_at: which rank stops, and after how many steps, each time.
        """
        place.mkdir(parents=True)
        trial = MeasuredTrial(
            job=self.job,
            engine=self.engine,
            ranks=self.ranks,
            run_options=(*SAME_NUMBERS, *SAME_SUMS),
            endless=False,
            record={"stop_at": stop_at},
        )
        return in_own_folder(trial.start(place), place.parent)

    def finish(self, place: Path) -> Finished:
        """Run it to its end in `place`.

        Raises:
            LaunchError: it fails, or takes no step.
        """
        began = time.time()
        code = run_to_end(self.start(place), place, place / "output", limit_s=END_S)
        if code != 0:
            what = f"had not ended after {END_S:g} s" if code is None else f"ended with code {code}"
            raise LaunchError(_said(what, place))
        for path in written_outside(place.parent):
            print(f"warning: {describe_outside(path)}", file=sys.stderr, flush=True)
        figures = read_figures(place, self.ranks, warmup_steps=0)
        if figures is None:
            raise NothingLeftError(_said(f"took no step{why_no_step(place.parent, place)}: {FEWER}", place))
        weights = [str(rank["weights"]) for rank in read_steps(place)]
        first_step_s = (place / FIRST_STEP).stat().st_mtime - began
        return Finished(figures["work"]["steps"], figures["step_s"], weights, first_step_s)

    def kill(self, place: Path, rank: int, steps: int, who: Who, moment: float) -> Killed:
        """Start it in `place`, and kill it at some time after a rank has made so many steps.

        Args:
            who: a rank, the launcher, or what is inside the next save of as many steps again.
            moment: seconds after these steps; of a save, the fraction of the file that is written.

        Raises:
            LaunchError: it does not come to this step, or ends before the kill.
        """
        began, saves = time.time(), Saves(place.parent)
        stops = [steps, 2 * steps] if who == "save" else [steps]
        with launched(self.start(place, rank, *stops), place, place / "output") as process:

            def wait_for(is_so: Callable[[], T | None]) -> T:
                has_ended = False
                while not (value := is_so()):  # looked at again after the end: it may have come to it by that
                    if has_ended:
                        kind = NothingLeftError if process.returncode == 0 else LaunchError
                        raise kind(_said(f"ended before the kill, or hangs: {FEWER}", place))
                    has_ended = time.time() > began + END_S or process.poll() is not None
                    time.sleep(POLL_S)
                return value

            victim, saving = wait_for(partial(stopped, place / MARK.format(steps))), ""
            ranks = {other.pid: rank_of(other.pid, rank) for other in find_processes(place)}
            if who == "save":
                saves.arm(moment)
                os.kill(victim, signal.SIGCONT)
                wait_for(lambda: saves.hit() or stopped(place / MARK.format(2 * steps)))
                if hit := saves.disarm():
                    victim, file = hit
                    # One that lives on has saved less than before, and was not inside.
                    saving = file if has_ended(victim, SAVE_S) else ""
            else:
                os.kill(victim, signal.SIGCONT)
                time.sleep(moment)
                victim = process.pid if who == "launcher" else victim
            with suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
            name = "the launcher" if victim == process.pid else f"rank {ranks.get(victim, rank)}"
            with suppress(subprocess.TimeoutExpired):
                process.wait(AFTER_KILL_S)
            settle = time.monotonic() + SETTLE_S
            while left := {other.pid for other in find_processes(place)} - {process.pid}:
                if time.monotonic() > settle:
                    break
                time.sleep(POLL_S)
            first_step_s = (place / FIRST_STEP).stat().st_mtime - began
            return Killed(name, steps, first_step_s, len(left) + (process.poll() is None), saving)


def stopped(mark: Path) -> int | None:
    """Return the process that has left this mark, if it has stopped."""
    if not mark.exists():
        return None
    pid = int(mark.read_text())
    with suppress(psutil.Error):  # one that has ended is told as the launcher's end
        return pid if psutil.Process(pid).status() == psutil.STATUS_STOPPED else None
    return None


def has_ended(pid: int, limit_s: float) -> bool:
    """Wait for the end of a process for so many seconds, and return whether it has come."""
    deadline = time.monotonic() + limit_s
    with suppress(psutil.Error):
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
    return True


def rank_of(pid: int, default: int) -> int:
    """Return the rank of a process by its environment; `default` if it cannot be read."""
    with suppress(psutil.Error, LaunchError):
        return detect(psutil.Process(pid).environ()).rank
    return default


def _said(what: str, place: Path) -> str:
    return f"The job {what}:\n{(place / 'output').read_text(errors='replace')[-2000:]}"


class Campaign(NamedTuple):
    """What the undisturbed run and the killed one have shown."""

    kills: Sequence[Killed]
    recoveries_s: Sequence[float]
    """from each start after a kill to the end of its first step"""
    last_steps: int
    """that were left after the last kill"""
    same: bool
    """whether each rank has trained the same weights in both"""
    ranks: int
    failure: str = ""
    """why the job did not run again after the last kill; empty if it did"""
    ranks_differ: bool = False
    """whether the ranks of the undisturbed run have other weights than each other"""

    @property
    def tried(self) -> str:
        """What was tried, in words."""
        in_saves = sum(bool(killed.saving) for killed in self.kills)
        return f"{plural(len(self.kills), 'kill')} at random moments, {in_saves or 'none'} of them inside a save"

    def report(self, ran: Ran) -> Report:
        """Return what it proves."""
        verdicts, left = (
            [self._verdict()],
            plural(sum(killed.left for killed in self.kills), "process", "processes"),
        )
        if any(killed.left for killed in self.kills):
            text = f"Ranks or launchers outlived a kill: {left} left behind."
            verdicts.append(Verdict(text, "failed", badge=f"{left} LEFT".upper()))
        seconds = [self.kills[0].first_step_s, *self.recoveries_s]
        starts = [(killed.steps, str(killed), killed.victim, str(killed.left)) for killed in self.kills]
        starts += [] if self.failure else [(self.last_steps, "the end", "", "")]
        rows = [
            (str(number), str(steps), f"{first_s:.1f}", end, others)
            for number, (first_s, (steps, end, _, others)) in enumerate(zip(seconds, starts, strict=True), 1)
        ]
        kinds = {"": "the end", "the launcher": "the launcher killed"}
        recovery = [
            f"recovery, from a start to its first step: median {median(known):.1f} s, maximum {max(known):.1f} s"
            for known in [self.recoveries_s]
            if known
        ]
        return Report(
            ran=ran,
            verdicts=verdicts,
            bars=Bars(
                "Steps of each start, at least",
                "Each start resumes from what the one before has saved, and makes the steps since then again.",
                [
                    Bar(f"start {number}", [(kinds.get(victim, "a rank killed"), steps)])
                    for number, (steps, _, victim, _) in enumerate(starts, 1)
                ],
                "steps",
                ["a rank killed", "the launcher killed", "the end"],
            ),
            tables=[
                Table("Each start", ("start", "steps", "s to its first step", "end", "left"), rows, words=(3,))
            ],
            warnings=[RANKS_APART] if self.ranks_differ else [],
            notes=[
                *([] if self.failure else [f"after the last kill: {plural(self.last_steps, 'step')} to the end"]),
                *recovery,
                TWO_RANKS if self.ranks == 2 else ORDER_OF_SUMS,
            ],
        )

    def _verdict(self) -> Verdict:
        if self.failure:
            last = f"after {self.kills[-1]}"
            text = f"The job did not run again {last}: {self.failure.rstrip('.')}."
            details = [f"Tried: {self.tried}."]
            if self.kills[-1].saving:
                details.append(
                    "Write a checkpoint beside the last one, and give it its name when it is whole (os.replace)."
                )
            return Verdict(text, "failed", details, badge="DID NOT RESUME")
        after = f"After {self.tried}, the final weights are"
        if not self.same:
            return Verdict(f"{after} not those of the undisturbed run.", "failed", badge="OTHER WEIGHTS")
        if any(killed.saving for killed in self.kills):
            return Verdict(f"{after} the same, to the last bit.", "sure", badge="NOTHING LOST")
        more = "No save was seen, or each was too short: what a kill inside one leaves was not tried."
        return Verdict(f"{after} the same, to the last bit.", "unsure", [more], badge="NOTHING LOST, NO SAVE HIT")


def verify(script: Script, *, kills: int, draw: random.Random, folder: Path) -> Campaign:
    """Run a script undisturbed and with kills, and print each kill.

    Raises:
        LaunchError: the script fails without a kill, or does not resume.
        OptionError: it makes fewer steps than there are kills.
    """
    ranks = f"{plural(script.ranks, 'rank')} on {script.engine}"
    print(
        f"one run of {ranks} without a kill, then {plural(kills + 1, 'start')} with {plural(kills, 'kill')}: "
        f"about 2.5 times as long as one run in all, and {kills} more times its start; in seconds after the first",
        flush=True,
    )
    began = time.monotonic()
    undisturbed = script.finish(folder / "undisturbed" / "start-1")
    steps, run_s = undisturbed.steps, time.monotonic() - began
    # The steps are made once or twice in all, and each start takes as long as this one's.
    left_s = kills * undisturbed.first_step_s + 1.5 * run_s
    print(f"undisturbed: {plural(steps, 'step')} of {ranks}, {run_s:.0f} s; about {left_s:.0f} s left", flush=True)
    limit = steps // (kills + 1)  # of each start, so that some are left for the last one
    if limit < 1:
        raise OptionError(f"--kills {kills}: the script makes {plural(steps, 'step')} only")
    saves = (kills + 2) // 3
    plan: list[Who] = ["save"] * saves
    plan += ["rank" if number % 2 else "launcher" for number in range(kills - saves)]
    draw.shuffle(plan)
    killed: list[Killed] = []
    ranks_differ = len({*undisturbed.weights}) > 1
    try:
        for number, who in enumerate(plan, 1):
            rank, step = draw.randrange(script.ranks), draw.randrange((limit + 3) // 4, (limit + 1) // 2 + 1)
            moment = draw.uniform(0, MAX_FRACTION if who == "save" else min(2, limit / 2) * undisturbed.step_s)
            killed.append(script.kill(folder / "killed" / f"start-{number}", rank, step, who, moment))
            print(f"kill {number}: {killed[-1]}, {plural(step, 'step')} or more after the start", flush=True)
        last = script.finish(folder / "killed" / f"start-{kills + 1}")
    except NothingLeftError:  # what was killed has made the last steps while it noticed that
        raise
    except LaunchError:
        place = folder / "killed" / f"start-{len(killed) + 1}"
        # A start that has taken a step has resumed: what ended it is no kill's.
        if not killed or (place / FIRST_STEP).exists():
            raise
        why, recoveries = why_it_failed(place, 1), [run.first_step_s for run in killed[1:]]
        return Campaign(killed, recoveries, 0, False, script.ranks, why, ranks_differ)
    if last.steps >= steps:
        raise LaunchError(
            f"The script does not resume: started again after {plural(kills, 'kill')}, it made all "
            f"{plural(steps, 'step')} again. Let it save every {plural((limit + 3) // 4, 'step')} at least (or "
            f"train longer, or type fewer --kills), and load at its start what it has saved"
        )
    recoveries = [*(run.first_step_s for run in killed[1:]), last.first_step_s]
    same = last.weights == undisturbed.weights
    return Campaign(killed, recoveries, last.steps, same, script.ranks, ranks_differ=ranks_differ)


def main(argv: Sequence[str]) -> int:
    """Run the command, and return the exit code: 0 if nothing was lost, else 1.

    Raises:
        OptionError: an option is out of its range, or there is no job.
        LaunchError: the script fails without a kill, or does not resume.
    """
    ran = Ran.now(f"{COMMAND} verify-resume", argv)
    options, job = read_command("verify-resume", Options, argv)
    check_installed("jinja2", "rich")
    script = Script(job, choose_engine(options.backend, os.environ), options.np)
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
