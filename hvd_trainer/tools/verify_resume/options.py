"""The options of `verify-resume`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from hvd_trainer.config.checks import Count
from hvd_trainer.measure.command import NP


@dataclass(frozen=True)
class Options:
    """Kill a training again and again, and prove that nothing was lost.

    The script behind -- runs once undisturbed. Then it runs again, and ranks and the launcher are killed at random
    moments, a third of them inside a save; after each kill the same command continues. In the end both must have
    trained the same weights, to the last bit. Each of the two has a working folder of its own; where the script is
    told its checkpoint, write {folder}: a job that is built on the Trainer needs --log-dir {folder}/log --resume
    auto.

    Exit codes: 0 nothing was lost, 1 something was, 2 a mistake, or a run failed.
    """

    kills: Count = 12
    """how many"""
    backend: Literal["auto", "horovod", "ddp"] = "auto"
    """the engine; auto: ddp, as for `run`"""
    np: Annotated[Count, NP] = 3
    """ranks, as many as the job has; two cannot show the order of sums"""
    seed: int = 0
    """of moments and victims"""
    keep: bool = False
    """keep the folder of both runs"""
    out: Path = Path("runs/verify-resume")
    """folder for resume.html, .md and .json"""
