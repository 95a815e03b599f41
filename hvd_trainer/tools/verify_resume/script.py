"""Kill a script again and again, start it again with the same words, and compare its weights in the end.

The script saves and resumes by its own means: in its working folder, or in the folder that stands as {folder}
among its words. The run that is killed has others than the undisturbed run.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvd_trainer.errors import LaunchError, OptionError
from hvd_trainer.measure.after_steps import MARK
from hvd_trainer.tools.runner.failure_reason import why_no_step
from hvd_trainer.tools.runner.measured import MeasuredTrial
from hvd_trainer.tools.runner.own_files import describe_outside, in_own_folder, read_outside
from hvd_trainer.tools.runner.step_stats import RANKS_DIFFER
from hvd_trainer.tools.verify_resume.injector import running_job
from hvd_trainer.utils.text import plural

END_S, POLL_S = 3600.0, 0.005


def check_script(job: Sequence[str], launcher: str | None) -> None:
    """Check that a job is a script, which its engine's launcher starts.

    Raises:
        OptionError: it is not.
    """
    if launcher is not None:
        raise OptionError("--launcher is for the job of this command: a script is started by its engine's own")


@dataclass(frozen=True)
class Script:
    """A script, and what it runs on."""

    job: Sequence[str]
    engine: str
    ranks: int

    def trial(self, hold: tuple[int, int] | None = None) -> MeasuredTrial:
        """Return how it is run."""
        return MeasuredTrial(job=self.job, engine=self.engine, ranks=self.ranks, record={"hold": hold})

    def finish(self, place: Path) -> dict[str, Any]:
        """Run it to its end in `place`, that of one start in the run's, and return its figures."""
        trial = self.trial()
        with running_job(in_own_folder(trial.start(place), place.parent), place) as its:
            its.finish(END_S)
        for path in read_outside(place.parent):
            print(f"warning: {describe_outside(path)}", file=sys.stderr, flush=True)
        figures = trial.read(place)
        if figures is None:
            raise its.error(f"took no step{why_no_step(place.parent, place)}")
        return figures

    def kill(self, place: Path, rank: int, steps: int, *, launcher: bool) -> int:
        """Start it, kill a rank, or the launcher, after so many steps, and return how many processes are left."""
        late = "ended before the kill, or hangs: let it train longer, or type fewer --kills"
        start = self.trial((rank, steps)).start(place)
        with running_job(in_own_folder(start, place.parent), place) as its:
            its.wait_until((place / MARK).exists, late, limit_s=END_S, interval_s=POLL_S)
            its.kill(None if launcher else int((place / MARK).read_text()))
            return its.left_behind()


def verify_script(
    job: Sequence[str], *, engine: str, ranks: int, kills: int, draw: random.Random, folder: Path
) -> int:
    """Run a script undisturbed and with kills, print what happened, and return 0 if both trained the same weights.

    Raises:
        LaunchError: the script fails without a kill, or does not resume.
    """
    script, left = Script(job, engine, ranks), 0
    undisturbed = script.finish(folder / "undisturbed" / "start-1")
    steps = undisturbed["work"]["steps"]
    print(f"undisturbed: {plural(steps, 'step')} of {ranks} ranks on {engine}", flush=True)
    most = steps // (kills + 1)  # of each start, so that some are left for the last one
    if most < 1:
        raise OptionError(f"--kills {kills}: the script makes {plural(steps, 'step')} only")
    at_launcher = [number % 2 == 1 for number in range(kills)]
    draw.shuffle(at_launcher)
    for number, launcher in enumerate(at_launcher, 1):
        rank, step = draw.randrange(ranks), draw.randrange((most + 1) // 2, most + 1)
        left += script.kill(folder / "killed" / f"start-{number}", rank, step, launcher=launcher)
        who = "the launcher" if launcher else f"rank {rank}"
        print(f"kill {number}: {who}, {plural(step, 'step')} after the start", flush=True)
    disturbed = script.finish(folder / "killed" / f"start-{kills + 1}")
    again = disturbed["work"]["steps"]
    print(f"after the last kill: {plural(again, 'step')} to the end")
    if again >= steps:
        raise LaunchError(
            f"The script does not resume: started again after {plural(kills, 'kill')}, it made all "
            f"{plural(steps, 'step')} anew. Let it save every {plural((most + 1) // 2, 'step')} at least (or "
            f"train longer, or type fewer --kills), and load at its start what it has saved"
        )
    same = disturbed["weights"] == undisturbed["weights"] != RANKS_DIFFER
    print(f"final weights: {'the same, to the last bit' if same else 'other ones than in the undisturbed run'}")
    if left:
        print(f"left behind: {plural(left, 'process', 'processes')}")
    return int(not same or left > 0)
