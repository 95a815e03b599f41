"""Stand in for the top-level package `horovod` in scripts that run on torch.distributed."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import cloudpickle

from hvd_trainer.errors import LaunchError
from hvd_trainer.tools.run.local_ranks import run_ranks

__version__ = "0.28.1"
"""The version of Horovod whose API this is."""
_installed = PathFinder.find_spec("horovod")
__path__ = list(_installed.submodule_search_locations or ()) if _installed is not None else []
"""A package, so that it has submodules: `hvd_trainer.tools.run` answers for those with operations. The others are
those of the Horovod that is installed, if there is one, such as `horovod.runner`."""

OF_OTHER_HOSTS = (
    *("min_num_proc", "max_num_proc", "min_np", "max_np", "slots", "reset_limit", "cooldown_range"),
    *("hostfile", "host_discovery_script", "ssh_port", "ssh_identity_file", "output_filename"),
    *("use_mpi", "mpi_args"),
)
"""Arguments of `run` for launchers that start ranks elsewhere, or change their number."""


class RankFailedError(LaunchError, RuntimeError):
    """A rank has failed; Horovod's `run` raises a RuntimeError with these words, which scripts catch."""

    def __init__(self, code: int) -> None:
        super().__init__(
            f"horovod.run: Horovod detected that one or more processes exited with non-zero status: a rank has "
            f"ended with exit code {code}, and its output says why"
        )


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Sequence[int] | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    host_discovery_script: str | None = None,
    start_timeout: int | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: int | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    network_interfaces: Sequence[str] | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[Any]:
    """Call `func(*args, **kwargs)` in new processes, as the ranks of one job on this machine.

    Args:
        func: anything that cloudpickle takes.
        num_proc, np: how many ranks.
        hosts: this machine, or None.
        start_timeout: how long the ranks may take to meet, in seconds.
        executable: the ranks' Python; None: this one.
        disable_cache, verbose, use_gloo, network_interface, network_interfaces: of no effect on one machine.

    Returns:
        The result of each rank, in rank order.

    Raises:
        LaunchError: another argument is given, which would have no effect.
        RankFailedError: a rank has failed.
    """
    arguments = locals()
    given = [] if _is_here(hosts) else [f"hosts={hosts!r}"]
    given += [f"{name}={arguments[name]!r}" for name in OF_OTHER_HOSTS if arguments[name] not in (None, False)]
    if given:
        raise LaunchError(
            f"horovod.run starts ranks on this machine, on torch.distributed, and has no use for "
            f"{', '.join(given)}. Leave that out; for several hosts, start the script by torchrun, srun, mpirun "
            f"or horovodrun"
        )
    size = num_proc if np is None else np
    if size < 1:
        raise LaunchError(f"horovod.run needs a num_proc of 1 or more, not {size}")
    limit = [] if start_timeout is None else ["--startup-timeout-s", str(start_timeout)]
    with tempfile.TemporaryDirectory(prefix="hvd_trainer-run-") as name:
        folder = Path(name)
        call = cloudpickle.dumps((func, tuple(args), dict(kwargs or {})))
        (folder / "call").write_bytes(cloudpickle.dumps((sys.path, call)))
        command = [executable or sys.executable, "-m", "hvd_trainer", "run", *limit]
        code = run_ranks([*command, "--", "-m", "hvd_trainer.tools.run.call", name], size)
        if code != 0:
            raise RankFailedError(code)
        return [cloudpickle.loads((folder / str(rank)).read_bytes()) for rank in range(size)]


def _is_here(hosts: str | None) -> bool:
    """Return whether a list such as `localhost:2` names this machine only."""
    names = {entry.partition(":")[0] for entry in (hosts or "localhost").split(",")}
    return names <= {"localhost", "127.0.0.1", os.uname().nodename, socket.getfqdn()}
