"""One rank of a script: run it on the engine, and end with the exit code of a job of this package."""

from __future__ import annotations

import functools
import logging
import os
import runpy
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import NoReturn

from hvd_trainer.backends.script_session import ScriptSession
from hvd_trainer.config.options import EngineOptions
from hvd_trainer.launch.launchers import choose_launcher
from hvd_trainer.launch.world import detect, rank_variables
from hvd_trainer.tools.probe.execute import execute, finish_threads_and_handlers
from hvd_trainer.tools.probe.options import SITE, ProbeOptions
from hvd_trainer.tools.run import engines
from hvd_trainer.training.job import run_and_end

ENGINE = "HVD_TRAINER_ENGINE"
"""Variable by which Python processes that the script starts find the engine, in probe/site/sitecustomize.py."""
logger = logging.getLogger(__name__)


def run_script(
    job: Sequence[str], options: EngineOptions, *, timeout_s: float | None, bucket_mb: float | None
) -> NoReturn:
    """Run a script or a module as this process's program, and end the process.

    Args:
        job: the words behind `python`: a file, or -m and a module, and its arguments.
        options: with the engine, `horovod` or `ddp`.
        timeout_s: as in `ScriptSession`.
        bucket_mb: size of the buckets of DistributedDataParallel; None: as the script says.

    Exit codes are those of `run_job`, and of the script if it leaves by `sys.exit`.
    """
    session = ScriptSession(options, timeout_s=timeout_s)
    run_and_end(functools.partial(_run, job, options.backend, session, bucket_mb), finish_threads_and_handlers)


def _run(job: Sequence[str], engine: str, session: ScriptSession, bucket_mb: float | None) -> None:
    _set_variables(engine)
    engines.import_hooks(engine, session, bucket_mb).install()
    if (probe := ProbeOptions.read(os.environ)) is not None:
        from hvd_trainer.tools.probe.install import install_probe  # with torch

        install_probe(probe)
    left: SystemExit | None = None
    os._exit = functools.partial(_exit, session, os._exit)
    try:
        execute(job)
    except SystemExit as leaving:
        if leaving.code not in (None, 0):
            session.fail(leaving)
            raise
        left = leaving
    except BaseException as error:
        error.__traceback__ = _users_part(error.__traceback__)
        session.fail(error)
        raise
    world = detect(os.environ)
    if world.size > 1 and not session.has_started and world.is_first:
        logger.warning(
            "warning: the script has started neither horovod.torch nor torch.distributed, so each of the %d "
            "processes has run it alone",
            world.size,
        )
    finish_threads_and_handlers()
    session.finish(left)


def _exit(session: ScriptSession, leave: Callable[[int], NoReturn], code: int) -> NoReturn:
    """Leave by `os._exit`; a rank that is done waits until all are: its end would be taken for a failure."""
    if code == 0 and session.is_own_process:
        session.finish()
    leave(code)


def _set_variables(engine: str) -> None:
    """Set the rank variables of torchrun and horovodrun, which scripts read, and the engine for children."""
    world = detect(os.environ)
    numbers = {**rank_variables("hand", world), **rank_variables("horovodrun", world)}
    for name, number in numbers.items():
        os.environ.setdefault(name, number)
    choose_launcher(os.environ, world.launcher)
    folders = [str(SITE), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    os.environ[ENGINE] = engine


def _users_part(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames that ran the script; the whole one if there are no others."""
    hidden = (__file__, execute.__code__.co_filename, runpy.__file__, f"<frozen {runpy.__name__}>")
    rest = trace
    while rest is not None and rest.tb_frame.f_code.co_filename in hidden:
        rest = rest.tb_next
    return rest or trace
