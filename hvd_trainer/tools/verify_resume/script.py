"""Kill a script again and again, start it again with the same words, and compare its weights in the end.

The script saves and resumes by its own means, in the folder that stands as {folder} among its words: each of the
two runs has its own.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hvd_trainer.errors import LaunchError, OptionError
from hvd_trainer.tools.runner.measured import measured_start, read_measured
from hvd_trainer.tools.runner.step_stats import RANKS_DIFFER
from hvd_trainer.tools.verify_resume.injector import FaultInjector, PlannedKill
from hvd_trainer.utils.text import COMMAND, plural

FOLDER = "{folder}"
"""Stands among the words of the script for the folder of a run."""
PLACES = ("launcher", "any")


def check_script(job: Sequence[str]) -> None:
    """Check that two runs of a script can be kept apart.

    Raises:
        OptionError: they cannot.
    """
    if not any(FOLDER in word for word in job):
        raise OptionError(
            f"The killed run would go on with what the undisturbed one has saved. Write {FOLDER} where the script "
            f"is told its checkpoint, so that each run has its own: {COMMAND} verify-resume -- {job[0]} ... "
            f"--checkpoint {FOLDER}/checkpoint.pt"
        )


def verify_script(
    job: Sequence[str], *, engine: str, ranks: int, kills: int, draw: random.Random, folder: Path
) -> int:
    """Run a script undisturbed and with kills, print what happened, and return 0 if both trained the same weights.

    Raises:
        LaunchError: the script fails without a kill, or does not resume.
    """

    def start(name: str) -> FaultInjector:
        place = folder / name
        words = [word.replace(FOLDER, str(place / "kept")) for word in job]
        (place / "kept").mkdir(parents=True, exist_ok=True)
        command, variables = measured_start(words, engine=engine, ranks=ranks, log=place / "log")
        return FaultInjector(
            command, place, ranks, program=words[1] if words[0] == "-m" else words[0], variables=variables
        )

    def figures(name: str) -> dict[str, Any]:
        found = read_measured(folder / name / "log", job=job, ranks=ranks, warmup_steps=0)
        if found is None:
            raise LaunchError("The script ended without having trained: it took no optimizer step")
        return found

    with start("undisturbed") as whole:
        whole.finish()
    undisturbed = figures("undisturbed")
    steps = undisturbed["work"]["steps"]
    print(f"undisturbed: {plural(steps, 'step')} of {ranks} ranks on {engine}", flush=True)
    if steps <= 2 * kills:
        raise OptionError(f"The script makes {plural(steps, 'step')}: too few for --kills {kills}")
    left_behind = 0
    for number in range(1, kills + 1):
        step = draw.randrange(1, max(2, steps // (kills + 1)))
        with start("disturbed") as injector:
            kill = injector.inject(PlannedKill(PLACES[number % 2], draw.randrange(ranks), step, 0.0))
        if kill is None:
            raise LaunchError(f"The script ended before kill {number}: let it train longer, or type fewer --kills")
        left_behind += kill.left_behind
        who = "the launcher" if kill.rank is None else f"rank {kill.rank}"
        print(f"kill {number}: {who}, {plural(kill.step, 'step')} after the start", flush=True)
    with start("disturbed") as injector:
        injector.finish()
    disturbed = figures("disturbed")
    again = disturbed["work"]["steps"]
    print(f"after the last kill: {plural(again, 'step')} to the end")
    if again >= steps:
        raise LaunchError(
            f"The script does not resume: started again after {plural(kills, 'kill')}, it made "
            f"all {plural(steps, 'step')} anew. Let it save often, and load at its start what it has saved"
        )
    same = disturbed["weights"] == undisturbed["weights"] != RANKS_DIFFER
    print(f"final weights: {'the same, to the last bit' if same else 'other ones than in the undisturbed run'}")
    if left_behind:
        print(f"left behind: {plural(left_behind, 'process', 'processes')}")
    return int(not same or left_behind > 0)
