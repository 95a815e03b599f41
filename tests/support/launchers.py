"""Start real ranks through real launchers, with a time limit, and leave nothing behind.

One command and its output::

    result = launch("horovodrun", 2, ["-m", "hvd_trainer.mnist", "--epochs", "1"])

One function in N real ranks, and what each returned; with :func:`run_ranks` the function says which rank it is::

    values = in_ranks(3, function, argument)
    values = run_ranks(function, num_processes=3, launcher="torchrun")

A launch that the test disturbs::

    with start("srun", 2, ["script.py"]) as job:
        job.ranks(2)[1].kill()
        result = job.wait()
"""

from __future__ import annotations

import os
import pickle
import secrets
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import process_tree
import slurm_cluster
import warm
from child_environment import child_environment
from job import Job, LaunchError, LaunchTimeoutError, OrphanError, Result
from requirements import HOROVODRUN, LAUNCHERS, QUICKEST, requires
from waiting import PATIENCE_S

__all__ = [
    "LAUNCHERS",
    "QUICKEST",
    "SCRIPTS",
    "SUPPORT",
    "Job",
    "LaunchError",
    "LaunchTimeoutError",
    "OrphanError",
    "RankError",
    "Result",
    "command_line",
    "in_ranks",
    "launch",
    "requires",
    "run_ranks",
    "start",
    "write_script",
]

REPOSITORY = Path(__file__).resolve().parents[2]
SUPPORT = Path(__file__).resolve().parent
"""The folder of scripts that tests start."""
SCRIPTS = SUPPORT.parent / "scripts"
"""The folder of scripts as users write them, without this package."""
OWN_FRAME = f'File "{REPOSITORY}/hvd_trainer/'
"""Begins a line of a traceback in this package. A clone, with its .venv, may lie in a folder of the same name."""


class RankError(LaunchError):
    """A function given to :func:`run_ranks` raised; the first rank's traceback comes first."""


def command_line(launcher: str, num_processes: int, argv: Sequence[str], options: Sequence[str] = ()) -> list[str]:
    """Return the command as a user would type it; ``options`` go to the launcher.

    Raises:
        ValueError: no such launcher, or more than one process with plain ``python``.
    """
    python = [sys.executable, *argv]
    number = str(num_processes)
    if launcher == "horovodrun":
        return [str(HOROVODRUN), "-np", number, *options, *python]
    if launcher == "torchrun":
        alone = [] if any(option.startswith("--rdzv") for option in options) else ["--standalone"]
        run = [sys.executable, "-m", "torch.distributed.run", *alone]
        return [*run, "--nproc-per-node", number, *options, *argv]
    if launcher == "mpirun":
        # Open MPI refuses root, and more ranks than cores, unless told.
        as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        return ["mpirun", *as_root, "--oversubscribe", "-np", number, *options, *python]
    if launcher == "srun":
        return ["srun", "--mpi=none", "-n", number, *options, *python]
    if launcher == "hand":
        return [sys.executable, str(SUPPORT / "by_variables.py"), number, *options, "--", *argv]
    if launcher == QUICKEST:
        return warm.command_line(num_processes, list(argv))
    if launcher != "python":
        raise ValueError(f"no launcher {launcher!r}; there are: {', '.join(LAUNCHERS)}")
    if num_processes != 1:
        raise ValueError(f"plain python starts 1 process, not {num_processes}")
    return python


@contextmanager
def start(
    launcher: str,
    num_processes: int,
    argv: Sequence[str],
    *,
    options: Sequence[str] = (),
    env: Mapping[str, str | None] | None = None,
    cwd: str | os.PathLike[str] = REPOSITORY,
) -> Iterator[Job]:
    """Start a launch; at the end of the block whatever still lives of it is killed.

    Args:
        launcher: one of :data:`LAUNCHERS`, or "hand": nobody but the variables that tell ranks their numbers.
        num_processes: ranks in all.
        argv: what follows ``python``: a script or ``-m module``, and its arguments.
        options: further options of the launcher, such as ``["-N", "2"]`` for srun; by hand, more variables.
        env: set on top of this process's environment; None removes a variable.
        cwd: where the launcher is started; the repository's root unless given.

    Raises:
        OrphanError: at the block's normal end the launcher has ended and a process is left.
    """
    name = f"job-{secrets.token_hex(8)}"
    mark = f"{os.environ.get(process_tree.MARK, 'session')}/{name}"
    argv = [str(argument) for argument in argv]
    changes = {**({} if launcher == QUICKEST else warm.variables()), **(env or {})}
    if launcher == "srun":
        changes.update(slurm_cluster.shared().environ)
        options = [f"--job-name={name}", *options]
    command = command_line(launcher, num_processes, argv, options)
    # Directly under the system's temporary folder: sockets lie in it, their paths must be short.
    folder = Path(tempfile.mkdtemp(prefix="hvd-job-"))
    try:
        environ = child_environment(os.environ, changes, mark=mark, folder=folder)
        job = Job(command, argv, mark=mark, folder=folder, env=environ, cwd=Path(cwd))
        try:
            yield job
            if job.popen.poll() is not None:
                job.check_nothing_left()
        finally:
            if launcher == "srun" and job.processes():
                slurm_cluster.shared().cancel(name)
            job.destroy()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def launch(
    launcher: str,
    num_processes: int,
    argv: Sequence[str],
    *,
    options: Sequence[str] = (),
    env: Mapping[str, str | None] | None = None,
    cwd: str | os.PathLike[str] = REPOSITORY,
    timeout_s: float = PATIENCE_S,
    check: bool = True,
) -> Result:
    """Run one command to its end; the other arguments are those of :func:`start`.

    Raises:
        LaunchError: the launcher's exit code is not 0 and ``check`` is set.
        LaunchTimeoutError: not ended after ``timeout_s`` seconds; everything has been killed.
        OrphanError: it ended and left a process behind, which has been killed.
    """
    with start(launcher, num_processes, argv, options=options, env=env, cwd=cwd) as job:
        result = job.wait(timeout_s)
        if check and result.returncode != 0:
            raise LaunchError(job.report(f"exit code {result.returncode}"))
    return result


def run_ranks(
    function: Callable[..., tuple[int, Any]],
    *,
    num_processes: int,
    launcher: str = QUICKEST,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    options: Sequence[str] = (),
    env: Mapping[str, str | None] | None = None,
    timeout_s: float = PATIENCE_S,
) -> list[Any]:
    """Call ``function`` in every rank of a real launch; return the ranks' values in rank order.

    The function stands at the top level of a test module and returns ``(rank, value)``: only the
    code under test says which rank it is, and ranks other than exactly 0 .. N-1 fail here.
    Arguments and values are pickled.

    Raises:
        RankError: it raised in some rank.
        LaunchError: it did not, but the exit code is not 0 or the ranks are not 0 .. N-1.
        LaunchTimeoutError: not ended after ``timeout_s`` seconds and no rank has raised.
    """
    with tempfile.TemporaryDirectory(prefix="hvd-ranks-") as name:
        folder = Path(name)
        call = pickle.dumps(sys.path) + pickle.dumps((function, tuple(args), dict(kwargs or {})))
        (folder / "call.pickle").write_bytes(call)
        worker = [str(SUPPORT / "rank_worker.py"), name]
        with start(launcher, num_processes, worker, options=options, env=env) as job:
            try:
                result = job.wait(timeout_s)
            except LaunchTimeoutError as error:
                # A rank that raised explains why the others hang; the time limit does not.
                _raise_first_failure(folder, str(error))
                raise
            _raise_first_failure(folder, job.report(f"exit code {result.returncode}"))
            if result.returncode != 0:
                raise LaunchError(job.report(f"no rank raised, exit code {result.returncode}"))
        return _in_rank_order([value for _, value in _outcomes(folder)], num_processes)


def in_ranks(
    size: int,
    function: Callable[..., Any],
    *args: Any,
    env: Mapping[str, str | None] | None = None,
    timeout_s: float = PATIENCE_S,
    **kwargs: Any,
) -> list[Any]:
    """Call a function in so many ranks by `QUICKEST`, which numbers them; return their values in rank order.

    The function stands at the top level of a test module; errors are those of :func:`run_ranks`.
    """
    call = (function, *args)
    return run_ranks(_numbered, num_processes=size, args=call, kwargs=kwargs, env=env, timeout_s=timeout_s)


def _numbered(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[int, Any]:
    rank = int(os.environ["RANK"])  # first: the function may change its variables
    return rank, function(*args, **kwargs)


def write_script(file: Path, text: str) -> Path:
    """Write a script for a test to start; return its file."""
    file.write_text(text)
    return file


def _outcomes(folder: Path) -> list[tuple[bool, Any]]:
    """Return (failed, value or traceback) of each rank, the earliest first."""
    records = [pickle.loads(file.read_bytes()) for file in folder.glob("*.outcome")]
    ordered = sorted(records, key=lambda record: record[0])
    return [(failed, pickle.loads(outcome)) for _, failed, outcome in ordered]


def _raise_first_failure(folder: Path, report: str) -> None:
    failures = [value for failed, value in _outcomes(folder) if failed]
    if failures:
        first, *later = failures
        more = [f"then in another rank:\n{text}" for text in later]
        raise RankError("\n".join([f"in a rank:\n{first}", *more, report]))


def _in_rank_order(values: list[Any], num_processes: int) -> list[Any]:
    wanted = list(range(num_processes))
    pairs = [value for value in values if isinstance(value, tuple) and len(value) == 2]
    ranks = sorted(rank for rank, _ in pairs)
    if len(pairs) != len(values) or ranks != wanted:
        raise LaunchError(f"wanted (rank, value) from ranks {wanted}, got {values}")
    return [value for _, value in sorted(pairs, key=lambda pair: pair[0])]
