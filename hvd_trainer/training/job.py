"""Run a job as a process: parse its options, and end with one error message and an exit code."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NoReturn, TypeVar, cast

from hvd_trainer.config.options import TrainerOptions
from hvd_trainer.config.parser import parse
from hvd_trainer.errors import LaunchError, OptionError, PeerError, PreemptedError, UserError
from hvd_trainer.faults.failure_report import (
    CRASH_EXIT_CODE,
    GRACE_S,
    reporter,
    wait_for_launcher,
    write_torchrun_error,
)
from hvd_trainer.launch.slurm import slurm_step_id
from hvd_trainer.launch.world import World, detect, find_world, is_elastic, lone_process_warning, may_be_first
from hvd_trainer.observe.log_handler import install_handler
from hvd_trainer.utils.frames import format_traceback
from hvd_trainer.utils.process import ending_with_reader

T = TypeVar("T")
logger = logging.getLogger(__name__)

USER_ERROR, INTERRUPTED = 2, 130
PREEMPTED = 75
"""Exit code of a job that was stopped and has saved: EX_TEMPFAIL of sysexits.h."""
MESSAGE_GRACE_S = 1.0
"""Time for rank 0 to print a line, before the end of another rank makes the launcher end it."""


def run_job(options: type[T], job: Callable[[T], None], args: Sequence[str] | None = None) -> NoReturn:
    """Parse the command line, run the job, and end the process.

    Rank 0 alone reports an error that all ranks have in common. What the package logs is printed, unless the
    program has set up handlers of its own for the logger `hvd_trainer` or for all loggers.

    Exit codes: 0 done; 2 a mistake in options or set-up (one line says it); 1 a crash (with its traceback), or
    another rank failed; 75 stopped by SIGTERM or SIGUSR1, with everything saved; 130 interrupted by Ctrl-C. Some
    launchers exit with another code.
    """

    @ending_with_reader()
    def parse_and_run() -> None:
        warning = lone_process_warning(detect(os.environ), os.environ)
        if warning:
            logger.warning("warning: %s", warning)
        parsed = _parse(options, args, _is_first())
        if isinstance(parsed, TrainerOptions):
            from hvd_trainer.measure.trainer import as_asked  # with torch, after a mistake has been told

            # Also here, and not only in the Trainer, so that the job sees the engine that it gets.
            parsed = cast(T, as_asked(parsed, os.environ))
        job(parsed)

    run_and_end(parse_and_run)


def run_and_end(function: Callable[[], None], after_error: Callable[[], None] = lambda: None) -> NoReturn:
    """Call a function, and end the process with the exit code, and the message, of `run_job`.

    Args:
        after_error: is called when an error has been reported, and may take `GRACE_S`.
    """
    reporter.prints_tracebacks = True
    install_handler()
    try:
        function()
    except BaseException as error:
        code = _report(error)
        limit = threading.Timer(GRACE_S, os._exit, (code,))
        limit.daemon = True
        limit.start()
        after_error()
        _end(code)
    _end(0)


def _report(error: BaseException) -> int:
    """Log why the job ends, on the ranks that are to say it; return the exit code."""
    match error:
        case SystemExit(code=code):
            if not isinstance(code, int | None):
                sys.stderr.write(f"{code}\n")
                if not reporter.has_reported:
                    write_torchrun_error(str(code), os.environ)
            return code if isinstance(code, int) else int(code is not None)
        case KeyboardInterrupt():
            if _is_first():
                _log_error(None, "interrupted")
            return INTERRUPTED
        case PreemptedError():
            # The sender may repeat the signal, and the job ends anyway.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            if _is_first() and str(error):
                logger.warning("%s", error)
            else:
                wait_for_launcher(MESSAGE_GRACE_S)
            return PREEMPTED
        case PeerError():
            if not reporter.has_reported:
                _log_error(_world(), str(error))
            return CRASH_EXIT_CODE
        case UserError():
            if not reporter.has_reported:
                _log_user_error(error)
            return USER_ERROR
        case _:
            if not reporter.has_reported:
                # The first frame is that of `run_and_end`.
                inner = error.__traceback__ and error.__traceback__.tb_next
                _log_error(_world(), format_traceback(error.with_traceback(inner), os.environ))
            return CRASH_EXIT_CODE


def _log_user_error(error: UserError) -> None:
    """Log an error that all ranks may have in common: on rank 0; on another one if rank 0 does not end the job."""
    if _is_first():
        _log_error(None, str(error))  # an error of all ranks needs no rank number
    elif not (isinstance(error, OptionError) and is_elastic(os.environ)):
        # In elastic mode horovodrun ends no other rank after this one, so rank 0 has the time to report it.
        wait_for_launcher()
        _log_error(_world(), str(error))


def _is_first() -> bool:
    """Return whether this is rank 0 now: in elastic mode another process may become it."""
    return may_be_first(os.environ)


def _log_error(world: World | None, text: str) -> None:
    """Log an error with the rank that it comes from, if it is one of several."""
    where = f"[rank {world.rank}] " if world is not None and world.size > 1 else ""
    logger.error("%serror: %s", where, text)


def _world() -> World | None:
    """Return this process's rank now; None if its launcher's variables are incomplete."""
    with suppress(LaunchError):
        return find_world(os.environ)
    return None


def _parse(options: type[T], args: Sequence[str] | None, first: bool) -> T:
    """Return the options; rank 0 prints their mistakes, or a rank whose command line differs from rank 0's."""
    try:
        return parse(options, args, outputs=first)
    except SystemExit as leaving:
        if first or not leaving.code or is_elastic(os.environ):
            raise
        wait_for_launcher()
        return parse(options, args, outputs=True)


def _end(code: int) -> NoReturn:
    """End the process; after a failure without destructors, and under srun together with all other ranks.

    The destructors of a failed rank might wait for ranks that wait for it. srun without --kill-on-bad-exit lets
    the other ranks run on, so the Slurm step is cancelled, unless all ranks end by themselves.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if code == 0:
        sys.exit(0)
    step = slurm_step_id(os.environ)
    if step is not None and code != PREEMPTED:
        with suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(["scancel", "--signal=KILL", step], timeout=10, check=False, stderr=subprocess.DEVNULL)
    os._exit(code)
