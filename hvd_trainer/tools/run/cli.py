"""`python -m hvd_trainer run`: run a script as it is on the engine that you ask for.

python -m hvd_trainer run --np 2 --backend ddp -- train.py --epochs 1

Alone, it starts the ranks itself, on this machine. Under a launcher (torchrun, srun, mpirun, horovodrun) each of
the launcher's processes becomes a rank.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from hvd_trainer.config.checks import Count, NonNegative, NonNegativeInt, Positive
from hvd_trainer.config.options import EngineOptions
from hvd_trainer.errors import BackendError, LaunchError
from hvd_trainer.faults.failure_report import CRASH_EXIT_CODE, wait_for_launcher
from hvd_trainer.launch.engine import AUTO, choose_engine
from hvd_trainer.launch.launchers import forget_ranks
from hvd_trainer.launch.world import detect, is_rank, may_be_first, own_job_warning
from hvd_trainer.measure.command import NP, read_command
from hvd_trainer.measure.message import BACKEND
from hvd_trainer.tools.run.descendants import run_guarded
from hvd_trainer.tools.run.local_ranks import run_ranks
from hvd_trainer.utils.import_hooks import ImportHooks
from hvd_trainer.utils.text import COMMAND, INSTALL_HOROVOD

MEGABYTE = 2**20
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Options:
    """Run a script, or with -m a module, as it is on the engine that you ask for.

    A script that imports horovod.torch runs on Horovod itself, or on torch.distributed with the same results; one
    that calls torch.distributed runs on that, or on Horovod. The script stands behind --.
    """

    np: Annotated[Count | None, NP] = None
    """ranks to start on this machine, also in a shell of Slurm's, or a pod in which RANK is set; None: one, or
    those that a launcher has started"""
    backend: Literal["auto", "horovod", "ddp"] = "auto"
    """the engine: Horovod, or native torch.distributed; auto: Horovod under horovodrun, if it is installed, else
    ddp"""
    timeout_s: Positive | None = None
    """how long a rank may make no progress, in seconds, before the job ends with all ranks' stacks; None: they are
    reported after 600 s, and the job continues"""
    startup_timeout_s: Positive = 300.0
    """how long the ranks may take to meet"""
    threads: Count | None = None
    """CPU threads of each rank (OMP_NUM_THREADS); None: as that and the launcher say"""
    bucket_mb: Positive | None = None
    """size of the buckets of DistributedDataParallel, whatever the script says; they are laid out once, so that a
    script that resumes adds gradients up in the same order. None: as the script and PyTorch do"""
    check_ranks: Count | None = None
    """compare what the script has wrapped (DistributedDataParallel, hvd.DistributedOptimizer) after so many
    steps of its optimizers, too, and tell on which ranks it differs; None: at the end only"""
    exactly_horovod: bool = False
    """on ddp, too, take the step on gradients of zero that Horovod's broadcast_optimizer_state takes with a new
    optimizer, and let DistributedOptimizer forget the optimizer's state: for Horovod's own numbers"""
    fusion_threshold_mb: NonNegative | None = None
    """as in horovodrun (HOROVOD_FUSION_THRESHOLD): tensors are exchanged together up to this size"""
    cycle_time_ms: Positive | None = None
    """as in horovodrun (HOROVOD_CYCLE_TIME)"""
    cache_capacity: NonNegativeInt | None = None
    """as in horovodrun (HOROVOD_CACHE_CAPACITY); without effect on ddp"""

    def variables(self) -> dict[str, str]:
        """Return the environment variables that stand for these options, most of them as horovodrun sets them."""
        fusion = None if self.fusion_threshold_mb is None else int(self.fusion_threshold_mb * MEGABYTE)
        values = {
            "OMP_NUM_THREADS": self.threads,
            "HVD_TRAINER_EXACTLY_HOROVOD": 1 if self.exactly_horovod else None,
            "HOROVOD_FUSION_THRESHOLD": fusion,
            "HOROVOD_CYCLE_TIME": self.cycle_time_ms,
            "HOROVOD_CACHE_CAPACITY": self.cache_capacity,
        }
        return {name: str(value) for name, value in values.items() if value is not None}


def check_syntax(job: Sequence[str]) -> None:
    """Compile a script, so that a mistake in it is told by one process, as `python` tells it.

    Raises:
        SystemExit: it cannot be compiled.
    """
    if not job[0].endswith(".py"):
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they are given when the script is run
            compile(Path(job[0]).read_bytes(), job[0], "exec")
    except SyntaxError as error:
        if not may_be_first(os.environ):
            wait_for_launcher()
        traceback.print_exception(error.with_traceback(None))
        raise SystemExit(CRASH_EXIT_CODE) from None


def _python_options() -> list[str]:
    """Return the options of Python itself that this process was started with, such as -u."""
    before = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv) + 1]  # and -m and a module, or a program's file
    return before[: -2 if before[-2:-1] == ["-m"] else -1]


def main(argv: Sequence[str]) -> int:
    """Start the ranks and return their exit code; in a rank, run the script, which ends the process.

    Raises:
        OptionError: there is no script, or an option is out of its range.
        LaunchError: the launcher has started another number of ranks than was asked for.
        BackendError: the engine is not installed.
    """
    # Below a script of another `run` this process has that one's engine.
    ImportHooks.uninstall_all()
    options, job = read_command("run", Options, argv)
    if options.backend == "horovod" and importlib.util.find_spec("horovod") is None:
        raise BackendError(
            f"--backend horovod needs Horovod, and there is none here. Type: {INSTALL_HOROVOD}, or: {COMMAND} run "
            f"--backend ddp -- {' '.join(job)}"
        )
    if options.np is not None and not is_rank(os.environ):
        if warning := own_job_warning(os.environ):
            logger.warning("warning: %s", warning)
        forget_ranks(os.environ)
    check_syntax(job)
    world = detect(os.environ)
    python = [sys.executable, *_python_options()]
    if world.launcher == "python" and options.np not in (None, 1):
        assert options.np is not None
        os.environ.update(options.variables())
        # The ranks are the same command again, which there finds itself started by a launcher.
        command = [*python, "-m", "hvd_trainer", "run", *argv]
        return run_guarded(functools.partial(run_ranks, command, options.np, is_guard=True))
    if options.np not in (None, world.size):
        raise LaunchError(
            f"--np {options.np}, but {world.launcher} has started {world.size} ranks. Leave --np out: under a "
            f"launcher each of its processes is a rank"
        )
    os.environ.update(options.variables())
    engine: Any = choose_engine(options.backend, os.environ)
    if options.backend != AUTO:
        os.environ[BACKEND] = engine
    elif world.is_first and world.launcher == "horovodrun" and engine == "ddp":
        logger.warning(
            "warning: Horovod is not installed here, so the script runs on ddp. Type: %s", INSTALL_HOROVOD
        )
    from hvd_trainer.tools.run.script import run_script  # with torch, for which the parent of ranks need not wait

    return run_script(
        job,
        EngineOptions(backend=engine, startup_timeout_s=options.startup_timeout_s),
        timeout_s=options.timeout_s,
        bucket_mb=options.bucket_mb,
        check_ranks=options.check_ranks,
    )
