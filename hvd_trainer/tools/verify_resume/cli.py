"""Run `python -m hvd_trainer verify-resume`: kill a training again and again, and prove that nothing was lost."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge

from hvd_trainer.measure.command import read_command
from hvd_trainer.measure.formats import check_installed
from hvd_trainer.measure.machine import Ran
from hvd_trainer.measure.start import locked_folder
from hvd_trainer.tools.verify_resume.campaign import Script, verify
from hvd_trainer.utils.text import COMMAND


@dataclass(frozen=True)
class Options:
    """Kill a training again and again, and prove that nothing was lost.

    The script behind -- runs once undisturbed. Then it runs again, and ranks and the launcher are killed after
    random numbers of steps; after each kill the same command continues. In the end both must have trained the same
    weights, to the last bit. Each of the two has a working folder of its own; where the script is told its
    checkpoint, write {folder}: a job that is built on the Trainer needs --log-dir {folder}/log --resume auto.

    Exit codes: 0 nothing was lost, 1 something was, 2 a mistake, or a run failed.
    """

    kills: Annotated[int, Ge(1)] = 12
    """how many"""
    backend: Literal["horovod", "ddp"] = "horovod"
    """the engine"""
    np: Annotated[int, Ge(1)] = 2
    """ranks"""
    seed: int = 0
    """of moments and victims"""
    keep: bool = False
    """keep the folder of both runs"""
    out: Path = Path("runs/verify-resume")
    """folder for resume.html, .md and .json"""


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
    with locked_folder(options.out) as out:
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
