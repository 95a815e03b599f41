"""The options of `compare`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from hvd_trainer.config.checks import Count, NonNegative, NonNegativeInt, Positive
from hvd_trainer.errors import OptionError


@dataclass(frozen=True)
class CompareOptions:
    """Measure a job on both engines and with several values of its options, in rounds; say what is faster and why.

    The job stands behind --, as it would stand behind `python`. With --vary the last line starts the job with the
    values that are the fastest, which are also written as YAML for the job's --config.

    Example: compare --backend ddp --np 1,2,4 --vary chunks=1,2,4 --vary batch-size=32,64 --steps 20
    -- -m hvd_trainer.imdb --dataset synthetic --stages 2
    """

    np: Annotated[str, tyro.conf.arg(metavar="N,N,...", aliases=["-np"])] = "1,2"
    """numbers of ranks"""
    backend: Annotated[str, tyro.conf.arg(metavar="NAME,NAME")] = "horovod,ddp"
    """who takes part: horovod, ddp, single (one process without an engine), and where there are two GPUs or more
    data-parallel (torch.nn.DataParallel)"""
    vary: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="OPTION=V,V,...")] = ()
    """an option of the job and the values that it takes, such as chunks=1,2,4 or tf32=true,false; each is compared
    with the first. May be given again and again: all combinations are run, with a heat map. Of a script, threads,
    bucket-mb, fusion-threshold-mb and cycle-time-ms are those of `run`, unless its command has them"""
    baseline: Annotated[
        tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="'ENGINE SCRIPT ...'")
    ] = ()
    """a script of your own to compare with, which need not use this package, such as 'ddp plain.py --epochs 1';
    ENGINE says what starts it: ddp (torchrun) or horovod (horovodrun). May be given again and again"""
    rounds: NonNegativeInt = 5
    """how often everything is run; 0: only show what there is"""
    least: NonNegative = 0.01
    """the smallest difference in speed that matters, as a fraction"""
    steps: Count | None = None
    """optimizer steps of each run that count, whatever its --epochs; None: as many as the job makes"""
    warmup_steps: NonNegativeInt = 10
    """optimizer steps at the beginning of each run that do not count"""
    threads: Count | None = None
    """CPU threads of each rank; None: this machine's cores by the largest number of ranks"""
    out: Path = Path("runs/compare")
    """folder for the page, the tables and the runs; the same command again continues with what is there"""
    timeout_s: Positive = 1800.0
    """after so many seconds a run is killed; it is tried again when the same command is typed again"""
    retry_failed: bool = False
    """start again what has failed in this folder, too"""


def check_together(options: CompareOptions) -> None:
    """Check that the options go together.

    Raises:
        OptionError: they do not.
    """
    if options.vary and options.baseline:
        raise OptionError("--vary changes options of the job, which a --baseline has not: leave one out")


def read_ranks(text: str) -> list[int]:
    """Return the numbers of ranks of `--np 1,2,4`, in order.

    Raises:
        OptionError: one is no number above 0.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise OptionError(f"--np {text}: type numbers of ranks with commas between them, such as --np 1,2,4")
    return sorted({int(word) for word in words})
