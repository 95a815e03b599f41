"""Run `python -m hvd_trainer verify-resume`: kill a training again and again, and prove that nothing was lost."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge

from hvd_trainer.tools.runner.command import read_command
from hvd_trainer.tools.verify_resume.audit import verify_audit_job
from hvd_trainer.tools.verify_resume.injector import JOB
from hvd_trainer.tools.verify_resume.script import check_script, verify_script


@dataclass(frozen=True)
class Options:
    """Kill a training again and again, and prove that nothing was lost.

    A small job runs once undisturbed. Then it runs again, and its ranks and its launcher are killed at random
    moments of every phase, also while a checkpoint is being written; after each the same command goes on with
    --resume auto. In the end the two must agree: each bit of weights and optimizer, and each sample trained on
    once in every epoch.

    With -- SCRIPT ..., your script is killed and started again. Each run has a working folder of its own; where
    the script is told its checkpoint, write {folder}.

    Exit codes: 0 nothing was lost, 1 something was, 2 a mistake, or a run failed.
    """

    kills: Annotated[int, Ge(1)] = 12
    """how many"""
    backend: Literal["horovod", "ddp"] = "horovod"
    """the engine"""
    np: Annotated[int, Ge(1)] = 2
    """ranks"""
    launcher: Literal["horovodrun", "torchrun"] | None = None
    """of the small job; None: the engine's own"""
    seed: int = 0
    """of moments and victims"""
    keep: bool = False
    """keep the folder of both runs"""


def main(argv: Sequence[str]) -> int:
    """Run the command, and return the exit code: 0 if nothing was lost, else 1.

    Raises:
        OptionError: an option is out of its range, or the job is no script.
        LaunchError: the job does not run, killed or not.
    """
    takes_script = "--" in argv
    options, job = read_command("verify-resume", Options, argv if takes_script else [*argv, "--", "-m", JOB])
    if takes_script:
        check_script(job, options.launcher)
    folder = Path(tempfile.mkdtemp(prefix="hvd_trainer-verify-"))
    draw = random.Random(options.seed)
    more: Any = {"engine": options.backend, "ranks": options.np, "kills": options.kills, "folder": folder}
    try:
        if takes_script:
            return verify_script(job, draw=draw, **more)
        return verify_audit_job(options.launcher, draw=draw, **more)
    finally:
        if options.keep:
            print(f"both runs are in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
