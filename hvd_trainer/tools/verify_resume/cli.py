"""Run `python -m hvd_trainer verify-resume`: kill a training again and again, and prove that nothing was lost.

A script is killed, started again with the same words, and its weights are compared in the end. It saves and
resumes by its own means: in its working folder, or in the folder that stands as {folder} among its words. The run
that is killed has others than the undisturbed run. A rank stops after a random number of steps; from there on

    a rank, the launcher    is killed after a random time
    a save                  is waited for: the process that has a file of the run open to write is stopped, and
                            killed if that is still so (what only appends to a file, such as a log, is no save)
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
from typing import Literal, NamedTuple

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
Who = Literal["rank", "launcher", "save"]
END_S, AFTER_KILL_S, SETTLE_S, POLL_S, SAVE_S = 3600.0, 180.0, 45.0, 0.005, 0.5


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


@dataclass(frozen=True)
class Script:
    """A script, and what it runs on."""

    job: Sequence[str]
    engine: str
    ranks: int

    def start(self, place: Path, stop_at: tuple[int, int] | None = None) -> Start:
        """Return how it is started in `place`, that of one start in the run's.

        Args:
            stop_at: which rank stops, and after how many steps.
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
            raise _error(f"had not ended after {END_S:g} s" if code is None else f"ended with code {code}", place)
        for path in written_outside(place.parent):
            print(f"warning: {describe_outside(path)}", file=sys.stderr, flush=True)
        figures = read_figures(place, self.ranks, warmup_steps=0)
        if figures is None:
            raise _error(f"took no step{why_no_step(place.parent, place)}", place)
        weights = [str(rank["weights"]) for rank in read_steps(place)]
        first_step_s = (place / FIRST_STEP).stat().st_mtime - began
        return Finished(figures["work"]["steps"], figures["step_s"], weights, first_step_s)

    def kill(self, place: Path, rank: int, steps: int, who: Who, wait_s: float) -> Killed:
        """Start it in `place`, and kill it at some time after a rank has made so many steps.

        Args:
            who: a rank, the launcher, or what is inside a save.
            wait_s: seconds after these steps; for a save, how long one is waited for.

        Raises:
            LaunchError: it does not come to this step, or ends before the kill.
        """
        began, mark, saving = time.time(), place / MARK, ""
        with launched(self.start(place, (rank, steps)), place, place / "output") as process:
            while not mark.exists():
                self._check(process, place, began)
                time.sleep(POLL_S)
            stopped = int(mark.read_text())
            ranks = [other.pid for other in find_processes(place) if other.pid != process.pid]
            before = {pid: saves_of(pid, place.parent) for pid in ranks}
            # While one rank is stopped, a save of another ends, and what is still open then always is.
            time.sleep(SAVE_S)
            before = {pid: files & saves_of(pid, place.parent) for pid, files in before.items()}
            with suppress(psutil.Error, ProcessLookupError):  # what has ended is told below
                while psutil.Process(stopped).status() != psutil.STATUS_STOPPED:
                    time.sleep(POLL_S)
                os.kill(stopped, signal.SIGCONT)
            deadline, victim = time.monotonic() + wait_s, process.pid if who == "launcher" else stopped
            while time.monotonic() < deadline and not saving and process.poll() is None:
                if who != "save":
                    time.sleep(min(POLL_S, max(0.0, deadline - time.monotonic())))
                    continue
                for pid in ranks:
                    if saving := _stopped_in_save(pid, place.parent, before[pid]):
                        victim = pid
                        break
            self._check(process, place, began)
            name = "the launcher" if victim == process.pid else f"rank {rank_of(victim, rank)}"
            with suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                process.wait(AFTER_KILL_S)
            settle = time.monotonic() + SETTLE_S
            while left := {other.pid for other in find_processes(place)} - {process.pid}:
                if time.monotonic() > settle:
                    break
                time.sleep(POLL_S)
            first_step_s = (place / FIRST_STEP).stat().st_mtime - began
            return Killed(name, steps, first_step_s, len(left) + (process.poll() is None), saving)

    @staticmethod
    def _check(process: subprocess.Popen[bytes], place: Path, began: float) -> None:
        """Check that a start has not ended, and does not hang.

        Raises:
            LaunchError: it has, or does.
        """
        if time.time() > began + END_S or process.poll() is not None:
            raise _error("ended before the kill, or hangs: let it train longer, or type fewer --kills", place)


def saves_of(pid: int, place: Path) -> set[str]:
    """Return the files of a run that a process has open to write, without those to which it only appends.

    Args:
        place: of the run.
    """
    below, saves = tuple(f"{place / name}{os.sep}" for name in ("files", "folder")), set()
    with suppress(OSError), os.scandir(f"/proc/{pid}/fd") as entries:
        for entry in entries:
            with suppress(OSError):  # it is closed again
                if (path := os.readlink(entry.path)).startswith(below):
                    info = Path(f"/proc/{pid}/fdinfo/{entry.name}").read_text()
                    flags = int(info.partition("flags:")[2].split()[0], 8)
                    if flags & os.O_ACCMODE != os.O_RDONLY and not flags & os.O_APPEND:
                        saves.add(path)
    return saves


def _stopped_in_save(pid: int, place: Path, before: set[str]) -> str:
    """Stop a process that is inside a save, and return the name of the file; empty if it is not.

    Args:
        before: files that it has open all the time.
    """
    if not saves_of(pid, place) - before:
        return ""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
        if saves := saves_of(pid, place) - before:
            return Path(min(saves)).name
        os.kill(pid, signal.SIGCONT)
    return ""


def rank_of(pid: int, default: int) -> int:
    """Return the rank of a process by its environment; `default` if it cannot be read."""
    with suppress(psutil.Error, LaunchError):
        return detect(psutil.Process(pid).environ()).rank
    return default


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
    undisturbed = script.finish(folder / "undisturbed" / "start-1")
    steps = undisturbed.steps
    print(f"undisturbed: {plural(steps, 'step')} of {plural(script.ranks, 'rank')} on {script.engine}", flush=True)
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
            wait_s = undisturbed.step_s * (limit / 2 if who == "save" else draw.uniform(0, min(2, limit / 2)))
            killed.append(script.kill(folder / "killed" / f"start-{number}", rank, step, who, wait_s))
            print(f"kill {number}: {killed[-1]}, {plural(step, 'step')} or more after the start", flush=True)
        last = script.finish(folder / "killed" / f"start-{kills + 1}")
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
