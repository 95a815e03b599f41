"""The options of `diagnose`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from hvd_trainer.config.checks import Count, Positive
from hvd_trainer.measure.command import NP


@dataclass(frozen=True)
class Options:
    """Find out what a step's time goes to, and what to do about it.

    The job stands behind --, as it would stand behind `python`.
    """

    np: Annotated[int, Meta(ge=2), NP] = 2
    """ranks"""
    backend: Literal["auto", "horovod", "ddp"] = "auto"
    """the engine; auto: ddp, as for `run`"""
    budget_s: Positive = 180.0
    """seconds that all of it may take"""
    threads: Count | None = None
    """CPU threads of each rank; None: as the launcher and OMP_NUM_THREADS say"""
    out: Path = Path("runs/diagnose")
    """folder for diagnosis.html, .md and .json, and stacks.speedscope.json"""
