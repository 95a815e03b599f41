"""Start ranks on this machine from a Python session or a notebook, without a launcher."""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import cloudpickle
import torch.multiprocessing as multiprocessing

from hvd_trainer.errors import LaunchError, PeerError
from hvd_trainer.faults.failure_report import GRACE_S, reporter, wait_for_launcher
from hvd_trainer.launch.launchers import without_ranks
from hvd_trainer.measure.message import Message
from hvd_trainer.observe.log_handler import install_handler
from hvd_trainer.rendezvous.endpoint import parse_endpoint
from hvd_trainer.rendezvous.store_client import local_store, rank_environment

UNGUARDED_EXIT_CODE = 93
"""Of a new process whose script calls `run` while it is imported."""


class Results(list[Any]):
    """What the function has returned, by ranks; a notebook shows nothing below the cell if that is nothing."""

    def _ipython_display_(self) -> None:
        if any(result is not None for result in self):
            raise NotImplementedError  # and the notebook shows it as any list


def run(
    function: Callable[..., Any],
    *,
    num_processes: int,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> list[Any]:
    """Call `function(*args, **kwargs)` in `num_processes` new processes, as the ranks of one job on this machine.

    The function may be defined in the notebook. A `Trainer` inside finds the other ranks as under any launcher. If
    a tool measures the script, such as `compare`, the ranks are those that the tool has started.

    Returns:
        The result of each rank, in rank order; of a rank that a tool has started, its own alone.

    Raises:
        LaunchError: fewer than one process was asked for; the function cannot be started in another process; or a
            rank failed: the others are ended, and the message has the failed rank's traceback.
    """
    if num_processes < 1:
        raise LaunchError(f"run needs num_processes of 1 or more, not {num_processes}.")
    if Message.read(os.environ) is not None:
        return Results([function(*args, **(kwargs or {}))])
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        # This is a new process that imports the script; what is raised here would be the end of a long traceback.
        os._exit(UNGUARDED_EXIT_CODE)
    if getattr(sys.modules["__main__"], "__file__", None) == "<stdin>":
        raise LaunchError("Each new process imports the script, and standard input is none: save it as a file.")
    try:
        call = cloudpickle.dumps((function, tuple(args), dict(kwargs or {})))
    except (TypeError, pickle.PicklingError) as error:
        raise LaunchError(
            f"run sends {function} with all that it uses to other processes, which is not possible: {error}. Make "
            f"that inside of the function."
        ) from None
    with local_store() as endpoint, tempfile.TemporaryDirectory(prefix="hvd_trainer-run-") as folder:
        processes = multiprocessing.start_processes(
            _run_rank,
            args=(num_processes, str(endpoint), call, folder),
            nprocs=num_processes,
            join=False,
            start_method="spawn",
        )
        try:
            while not processes.join():
                pass
        except multiprocessing.ProcessRaisedException as error:
            raise LaunchError(f"rank {error.error_index} of {num_processes} failed: {error}") from None
        except multiprocessing.ProcessExitedException as error:
            if error.exit_code == UNGUARDED_EXIT_CODE:
                raise LaunchError(
                    "Each new process imports the script, which calls run again: put that call under "
                    'if __name__ == "__main__":'
                ) from None
            code = f"by {error.signal_name}" if error.signal_name else f"with code {error.exit_code}"
            raise LaunchError(f"rank {error.error_index} of {num_processes} ended {code}.") from None
        except BaseException:
            _terminate(processes.processes)
            raise
        return Results(pickle.loads((Path(folder) / str(rank)).read_bytes()) for rank in range(num_processes))


def _terminate(processes: Sequence[BaseProcess]) -> None:
    """End the ranks that still run when the session is interrupted."""
    for process in processes:
        process.terminate()
    for process in processes:
        process.join(GRACE_S)
        if process.is_alive():
            process.kill()
            process.join()


def _run_rank(rank: int, size: int, endpoint: str, call: bytes, folder: str) -> None:
    """Set the rank variables of this new process, call the function, and write its result to a file."""
    # A notebook that itself runs under some launcher must not make its children part of that job.
    own = without_ranks(os.environ) | rank_environment(rank, size, parse_endpoint(endpoint))
    os.environ.clear()
    os.environ.update(own)
    function, args, kwargs = pickle.loads(call)
    install_handler()
    reporter.parent_reports = True
    try:
        result = function(*args, **kwargs)
    except PeerError:
        # The parent reports the rank that fails first: wait, so that it is the one with the cause.
        wait_for_launcher()
        raise
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
    (Path(folder) / str(rank)).write_bytes(cloudpickle.dumps(result))
