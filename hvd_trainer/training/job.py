"""How a job starts and ends as a process: options in, one clear error or a clean exit out."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NoReturn, TypeVar

from hvd_trainer.config.parser import parse
from hvd_trainer.errors import LaunchError, OptionError, PeerError, PreemptedError, UserError
from hvd_trainer.faults.failure_report import CRASH_EXIT_CODE, reporter
from hvd_trainer.faults.grace import wait_for_launcher
from hvd_trainer.launch.slurm import slurm_step_id
from hvd_trainer.launch.world import World, detect, is_elastic, lone_process_warning, may_be_first
from hvd_trainer.observe.log_handler import install_handler

T = TypeVar("T")
logger = logging.getLogger(__name__)

USER_ERROR, INTERRUPTED = 2, 130
PREEMPTED = 75
"""EX_TEMPFAIL of sysexits.h: try again later."""
SPEAKING_S = 1.0
"""What rank 0 is given to print a line before another rank's end makes the launcher end it."""


def run_job(options: type[T], job: Callable[[T], None], args: Sequence[str] | None = None) -> NoReturn:
    """Parses the command line, runs the job, and ends the process.

    An error that all ranks have in common is said once, by rank 0. What the package logs is printed, unless the
    program has set up handlers of its own for the logger `hvd_trainer` or for all loggers.

    Exit codes: 0 done; 2 a mistake in options or set-up (one line says it); 1 a crash (with its traceback), or
    another rank failed; 75 stopped by SIGTERM or SIGUSR1, with everything saved; 130 interrupted by Ctrl-C. A
    launcher may make another number of it.
    """
    reporter.prints_tracebacks = True
    install_handler()
    try:
        world = detect(os.environ)
        warning = lone_process_warning(world, os.environ)
        if warning:
            logger.warning("warning: %s", warning)
        job(_parse(options, args, _speaks()))
    except PreemptedError as error:
        # What stopped the job may send more signals; it ends in any case.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if _speaks() and str(error):
            logger.warning("%s", error)
        else:
            wait_for_launcher(SPEAKING_S)
        _end(PREEMPTED)
    except PeerError as error:
        if not reporter.has_reported:
            _log_error(_world(), str(error))
        _end(CRASH_EXIT_CODE)
    except UserError as error:
        if not reporter.has_reported:
            if not _speaks():
                if isinstance(error, OptionError) and is_elastic(os.environ):
                    _end(USER_ERROR)  # horovodrun ends nobody then, so that rank 0 has the time to say it
                wait_for_launcher()
            # Rank 0 speaks for all.
            _log_error(None if _speaks() else _world(), str(error))
        _end(USER_ERROR)
    except KeyboardInterrupt:
        if _speaks():
            _log_error(None, "interrupted")
        _end(INTERRUPTED)
    except SystemExit as leaving:
        _end(leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None))
    except BaseException:
        if not reporter.has_reported:
            _log_error(_world(), traceback.format_exc())
        _end(CRASH_EXIT_CODE)
    _end(0)


def _speaks() -> bool:
    """Whether this is rank 0, as of now: where ranks come and go, another process may become it."""
    return may_be_first(os.environ)


def _log_error(world: World | None, text: str) -> None:
    """Log an error with the rank that it comes from, if it is one of several."""
    where = f"[rank {world.rank}] " if world is not None and world.size > 1 else ""
    logger.error("%serror: %s", where, text)


def _world() -> World | None:
    """This process's place among all, as of now; None if its launcher's variables are not whole."""
    with suppress(LaunchError):
        return detect(os.environ)
    return None


def _parse(options: type[T], args: Sequence[str] | None, first: bool) -> T:
    """The options; what is wrong with them is printed by rank 0, or by a rank that alone was given others."""
    try:
        return parse(options, args, outputs=first)
    except SystemExit as leaving:
        if first or not leaving.code or is_elastic(os.environ):
            raise
        wait_for_launcher()
        return parse(options, args, outputs=True)


def _end(code: int) -> NoReturn:
    """Ends the process; after a failure at once, and under srun with all the others.

    A rank that failed must not wait in destructors for ranks that wait for it. srun alone lets the others run
    on when one ends (unless told --kill-on-bad-exit), so the step is cancelled, but where all end by themselves.
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
