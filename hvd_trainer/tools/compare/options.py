"""The options of `compare`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from hvd_trainer.config.checks import Count, NonNegative, NonNegativeInt, Positive
from hvd_trainer.errors import OptionError

NOT_SEARCHED = ("vary", "baseline", "steps", "threads", "retry_failed")
SEARCH_ONLY = ("run_s", "least_gain", "lossy")
"""Options that do not go together with --search, and those that need it."""
MIN_SEARCH_ROUNDS = 3


@dataclass(frozen=True)
class CompareOptions:
    """Measure a job on both engines and with several values of its options, in rounds; say what is faster and why.

    The job stands behind --, as it would stand behind `python`. With --search the fastest settings of each engine
    are searched, and written as YAML for the job's --config; for a script that is not built on the Trainer these
    are options of `run`. What the job is typed with stays as it is.

    Example: compare --backend ddp --np 1,2,4 --vary chunks=1,2,4 --vary batch-size=32,64 --steps 20
    -- -m hvd_trainer.imdb --dataset synthetic --stages 2
    """

    np: Annotated[str | None, tyro.conf.arg(metavar="N,N,...")] = None
    """numbers of ranks; None: 1,2, and with --search 2"""
    backend: Annotated[str, tyro.conf.arg(metavar="NAME,NAME")] = "horovod,ddp"
    """who takes part: horovod, ddp, single (one process without an engine), and where there are two GPUs or more
    data-parallel (torch.nn.DataParallel)"""
    vary: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="OPTION=V,V,...")] = ()
    """an option of the job and the values that it takes, such as chunks=1,2,4 or tf32=true,false. May be given
    again and again: all combinations are run, with a heat map"""
    baseline: Annotated[
        tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="'ENGINE SCRIPT ...'")
    ] = ()
    """a script of your own to compare with, which need not use this package, such as 'ddp plain.py --epochs 1';
    ENGINE says what starts it: ddp (torchrun) or horovod (horovodrun). May be given again and again"""
    search: bool = False
    """search the fastest settings of each engine for the job"""
    rounds: NonNegativeInt = 5
    """how often everything is run; 0: only show what there is. With --search: how often a setting is run at most,
    and how often the result is run to confirm it"""
    steps: Count | None = None
    """optimizer steps of each run that count, whatever its --epochs; None: as many as the job makes"""
    warmup_steps: NonNegativeInt = 10
    """optimizer steps at the beginning of each run that do not count"""
    threads: Count | None = None
    """CPU threads of each rank; None: this machine's cores by the largest number of ranks"""
    run_s: Positive = 4.0
    """with --search: seconds that each run trains, about; starting it takes longer"""
    least_gain: NonNegative = 0.02
    """with --search: gains below this are not searched for, as a fraction"""
    lossy: bool = False
    """with --search: also try what rounds the gradients: --compression"""
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
    default = CompareOptions()
    refused = NOT_SEARCHED if options.search else SEARCH_ONLY
    for name in refused:
        if getattr(options, name) != getattr(default, name):
            option = f"--{name.replace('_', '-')}"
            raise OptionError(
                f"{option} does not go with --search: leave one out"
                if options.search
                else f"{option} is for --search: add it, or leave {option} out"
            )
    if options.search and options.rounds < MIN_SEARCH_ROUNDS:
        raise OptionError(f"--search needs --rounds {MIN_SEARCH_ROUNDS} or more, not {options.rounds}")
    if options.vary and options.baseline:
        raise OptionError("--vary changes options of the job, which a --baseline has not: leave one out")


def read_ranks(text: str, *, only_one: bool = False) -> list[int]:
    """Return the numbers of ranks of `--np 1,2,4`, in order.

    Raises:
        OptionError: one is no number above 0, or there are several for a search.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise OptionError(f"--np {text}: type numbers of ranks with commas between them, such as --np 1,2,4")
    numbers = sorted({int(word) for word in words})
    if only_one and len(numbers) > 1:
        raise OptionError(f"--np {text}: --search takes one number of ranks, such as --np {numbers[-1]}")
    return numbers
