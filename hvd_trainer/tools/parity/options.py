"""The options of `parity`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from hvd_trainer.config.checks import Count, NonNegative, Positive
from hvd_trainer.measure.command import NP


@dataclass(frozen=True)
class ParityOptions:
    """Train a job for some steps on each engine, compare them step by step, and say where they part and why.

    The job stands behind --, as it would stand behind `python`: any script, for Horovod, torch.distributed or what
    is built on them, or for the Trainer. Exit codes: 0 they are the same (within the
    tolerance), 1 they are not, 2 a mistake, or a run failed.
    """

    np: Annotated[Count, NP] = 2
    """ranks, of both engines"""
    backend: str = "horovod,ddp"
    """two or three of: horovod, ddp, single (one process, with the same global batch; not for scripts)"""
    new: Path | None = None
    """a new version of the script, which the second engine runs; the first runs the script as it is"""
    exactly_horovod: bool = True
    """as in `run`, of a script for Horovod: with the traps that change its numbers"""
    steps: Count = 20
    """optimizer steps"""
    tolerance: NonNegative | None = None
    """relative difference that is allowed; None: as much as another order of sums makes, and 0 on CPUs"""
    threads: Count | None = None
    """CPU threads of each rank; None: this machine's cores by the number of ranks"""
    out: Path = Path("runs/parity")
    """folder for parity.html, .md and .json, and for the traces"""
    timeout_s: Positive = 600.0
    """after so many seconds a run is killed"""
