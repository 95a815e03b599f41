"""One rank of a script: run it on the engine, and end with the exit code of a job of this package."""

from __future__ import annotations

import functools
import logging
import os
import re
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from hvd_trainer.backends.script_engine import ScriptEngine
from hvd_trainer.config.options import EngineOptions
from hvd_trainer.launch.launchers import TORCH_NAMES, choose_launcher
from hvd_trainer.launch.world import World, is_elastic, rank_variables
from hvd_trainer.measure.command import option_values
from hvd_trainer.measure.message import SITE, Message
from hvd_trainer.rendezvous.connect import find_place
from hvd_trainer.tools.run import engines
from hvd_trainer.tools.run.local_ranks import meeting_address
from hvd_trainer.tools.run.wrapped_models import WrappedModels
from hvd_trainer.training.job import run_and_end
from hvd_trainer.utils.execute import execute, finish_threads_and_handlers
from hvd_trainer.utils.import_hooks import ImportHooks

ENGINE = "HVD_TRAINER_ENGINE"
"""Variable by which Python processes that the script starts find the engine, in measure/site/sitecustomize.py."""
LOCAL_RANK = "{local_rank}"
"""In a script's words: the rank's number on its machine."""
logger = logging.getLogger(__name__)


def run_script(
    job: Sequence[str],
    options: EngineOptions,
    *,
    timeout_s: float | None,
    bucket_mb: float | None,
    check_ranks: int | None,
) -> NoReturn:
    """Run a script or a module as this process's program, and end the process.

    Args:
        job: the words behind `python`: a file, or -m and a module, and its arguments.
        options: with the engine, `horovod` or `ddp`.
        timeout_s: as in `ScriptWatch`.
        bucket_mb: size of the buckets of DistributedDataParallel; None: as the script says.
        check_ranks: compare the ranks after so many steps of optimizers, too; None: at the end only.

    Exit codes are those of `run_job`, and of the script if it leaves by `sys.exit`.
    """
    world = find_place(os.environ, options.startup_timeout_s)
    job = [word.replace(LOCAL_RANK, str(world.local_rank)) for word in job]
    script = ScriptEngine(options, timeout_s=timeout_s)
    # In elastic mode ranks come and go, and those that are lost post nothing.
    wrapped = None if is_elastic(os.environ) else WrappedModels(script, check_ranks)
    hooks = engines.import_hooks(options.backend, script, bucket_mb=bucket_mb, wrapped=wrapped)
    compare = (lambda: None) if wrapped is None else wrapped.compare_at_end
    run_and_end(
        functools.partial(_run, job, world, options.backend, script, hooks, compare), finish_threads_and_handlers
    )


def _run(
    job: Sequence[str],
    world: World,
    engine: str,
    script: ScriptEngine,
    hooks: ImportHooks,
    compare_ranks: Callable[[], None],
) -> None:
    _set_variables(engine, world)
    hooks.install()
    if (message := Message.read(os.environ)) is not None:
        from hvd_trainer.measure.script import measure_script  # with torch

        measure_script(message)
    left: SystemExit | None = None
    _warn_of_local_rank(job, world)
    os._exit = functools.partial(_exit, script, compare_ranks, os._exit)
    try:
        execute(job)
    except SystemExit as leaving:
        if leaving.code not in (None, 0):
            script.end(leaving)
            raise
        left = leaving
    except BaseException as error:
        error.__traceback__ = _users_part(error.__traceback__)
        script.end(error)
        if sys.excepthook is not sys.__excepthook__:  # the script's own, such as a tracker of errors
            sys.excepthook(type(error), error, error.__traceback__)
        raise
    engines.warn_if_alone(script)
    finish_threads_and_handlers(compare_ranks)
    script.end(left)


def _warn_of_local_rank(job: Sequence[str], world: World) -> None:
    """Say what to type for a script that knows its rank by an option only, which torch.distributed.launch adds."""
    text = Path(job[0]).read_text(errors="replace") if job[0] != "-m" else ""
    option = re.search(r"--local[_-]rank\b", text)
    given = option is not None and option_values(job, "--local-rank")
    if option is not None and not given and TORCH_NAMES[2] not in text and world.size > 1 and world.is_first:
        logger.warning(
            "warning: %s has the option %s, and without it each of the %d processes may run alone. Type: "
            "... -- %s %s %s",
            job[0],
            option[0],
            world.size,
            " ".join(job),
            option[0],
            LOCAL_RANK,
        )


def _exit(
    script: ScriptEngine, compare_ranks: Callable[[], None], leave: Callable[[int], NoReturn], status: int
) -> NoReturn:
    """Leave by `os._exit`; a rank that is done waits until all are: its end would be taken for a failure."""
    try:
        if status == 0:
            compare_ranks()
            script.end()
    finally:
        leave(status)


def _set_variables(engine: str, world: World) -> None:
    """Set the rank variables of torchrun and horovodrun, which scripts read, and the engine for children."""
    values = {**rank_variables("hand", world), **rank_variables("horovodrun", world)}
    if world.size == 1:
        values |= meeting_address()
    for name, value in values.items():
        os.environ.setdefault(name, value)
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
