"""Kill a script again and again, start it again with the same words, and compare its weights in the end.

The script saves and resumes by its own means, in the folder that stands as {folder} among its words; the run that
is killed has another one than the undisturbed run.
"""

from __future__ import annotations

import random
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hvd_trainer.errors import LaunchError, OptionError
from hvd_trainer.tools.probe.step_kill import MARK
from hvd_trainer.tools.runner.measured import measured_start, read_measured
from hvd_trainer.tools.runner.runs import end_processes, find_processes, start
from hvd_trainer.tools.runner.step_stats import RANKS_DIFFER
from hvd_trainer.utils.text import COMMAND, plural

FOLDER = "{folder}"
"""Stands among the words of the script for the folder of a run."""
END_S, SETTLE_S = 3600.0, 10.0


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


class ScriptRuns:
    """Starts a script, and starts it again, in one folder for what it keeps.

    Args:
        job: the words that follow `python`.
        engine, ranks: what it runs on.
        folder: of these runs.
    """

    def __init__(self, job: Sequence[str], *, engine: str, ranks: int, folder: Path) -> None:
        self._job = [word.replace(FOLDER, str(folder)) for word in job]
        self._engine, self._ranks, self._folder = engine, ranks, folder
        self._starts = 0
        self.left_behind = 0
        """processes that had not ended some seconds after the launcher"""

    def run(self, kill: tuple[int, int] | None = None) -> dict[str, Any] | None:
        """Run it to its end, and return its figures; None if it was killed.

        Args:
            kill: the rank to be killed, and after how many steps.

        Raises:
            LaunchError: it failed by itself, takes too long, or makes fewer steps.
        """
        self._starts += 1
        place = self._folder / f"start-{self._starts}"
        place.mkdir(parents=True)
        log = place / "log"
        command, variables, _ = measured_start(
            self._job, engine=self._engine, ranks=self._ranks, log=log, kill=kill
        )
        process = start(command, place, place / "output", variables=variables)
        try:
            code = process.wait(END_S)
            settled = time.monotonic() + SETTLE_S
            while (left := find_processes(place)) and time.monotonic() < settled:
                time.sleep(0.02)
            self.left_behind += len(left)
        except subprocess.TimeoutExpired:
            raise LaunchError(f"The script had not ended after {END_S:g} s") from None
        finally:
            end_processes(place)
            process.wait()
        if (log / MARK).exists():
            return None
        figures = read_measured(log, job=self._job, ranks=self._ranks, warmup_steps=0)
        if code != 0 or figures is None:
            said = (place / "output").read_text(errors="replace")[-2000:]
            raise LaunchError(f"The script ended with code {code}, and took no step or failed:\n{said}")
        return figures


def verify_script(
    job: Sequence[str], *, engine: str, ranks: int, kills: int, draw: random.Random, folder: Path
) -> int:
    """Run a script undisturbed and with kills, print what happened, and return 0 if both trained the same weights.

    Raises:
        LaunchError: the script fails without a kill, or does not resume.
    """
    undisturbed = ScriptRuns(job, engine=engine, ranks=ranks, folder=folder / "undisturbed").run()
    assert undisturbed is not None
    steps = undisturbed["work"]["steps"]
    print(f"undisturbed: {plural(steps, 'step')} of {ranks} ranks on {engine}", flush=True)
    runs = ScriptRuns(job, engine=engine, ranks=ranks, folder=folder / "killed")
    most = steps // (kills + 1)  # of each start, so that some are left for the last one
    if most < 1:
        raise OptionError(f"--kills {kills}: the script makes {plural(steps, 'step')} only")
    for number in range(1, kills + 1):
        rank, step = draw.randrange(ranks), draw.randrange((most + 1) // 2, most + 1)
        if runs.run((rank, step)) is not None:
            raise LaunchError(f"The script ended before kill {number}: let it train longer, or type fewer --kills")
        print(f"kill {number}: rank {rank}, {plural(step, 'step')} after the start", flush=True)
    disturbed = runs.run()
    assert disturbed is not None
    again = disturbed["work"]["steps"]
    print(f"after the last kill: {plural(again, 'step')} to the end")
    if again >= steps:
        raise LaunchError(
            f"The script does not resume: started again after {plural(kills, 'kill')}, it made all "
            f"{plural(steps, 'step')} anew. Let it save often, and load at its start what it has saved"
        )
    same = disturbed["weights"] == undisturbed["weights"] != RANKS_DIFFER
    print(f"final weights: {'the same, to the last bit' if same else 'other ones than in the undisturbed run'}")
    if runs.left_behind:
        print(f"left behind: {plural(runs.left_behind, 'process', 'processes')}")
    return int(not same or runs.left_behind > 0)
