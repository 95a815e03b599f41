"""The session's server of processes that are forked with everything imported (see warm_server.py)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import process_tree
from child_environment import child_environment

from benchmarks import NO_GPUS

HERE = Path(__file__).parent
START_S = 240.0
PADDING = 4000
"""Bytes of the server's command line and mark to spare: processes that it forks write their own there."""
is_used = False
"""Whether launchers' processes are served, too: for tests marked `warm`."""
_servers: list[Server] = []


class Server:
    """One server, which takes a few seconds to start."""

    def __init__(self) -> None:
        # A socket's path must be short; and each host of benchmarks/hosts.py has a /tmp of its own.
        self._folder = Path(tempfile.mkdtemp(prefix="hvd-warm-", dir="/var/tmp"))
        self.address = str(self._folder / "socket")
        mark = f"{os.environ.get(process_tree.MARK, 'session')}/warm".ljust(PADDING, "/")
        environ = child_environment(os.environ, NO_GPUS, mark=mark, folder=self._folder)
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "warm_server.py"), self.address, " " * PADDING],
            env=environ,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        deadline = time.monotonic() + START_S
        while not Path(self.address).exists():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("the server of warm ranks did not start: see what it printed")
            time.sleep(0.02)

    def stop(self) -> None:
        """End the server."""
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def address() -> str:
    """Return the server's address; start it if there is none."""
    if not _servers:
        _servers.append(Server())
    return _servers[0].address


def command_line(num_processes: int, argv: list[str]) -> list[str]:
    """Return the command that starts so many ranks of `python ARGV`."""
    # Without site-packages it starts at once.
    return [sys.executable, "-S", str(HERE / "warm_client.py"), address(), str(num_processes), *argv]


def variables() -> dict[str, str]:
    """Return those by which the Python processes of a launch are served."""
    return {"HVD_TRAINER_TEST_WARM": address()} if is_used else {}


def stop_shared() -> None:
    """End the session's server, if there is one."""
    while _servers:
        _servers.pop().stop()
