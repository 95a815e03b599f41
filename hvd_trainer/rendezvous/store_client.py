"""How rank 0 starts the server of a job's store, and all ranks come to it: by a ticket that only they have."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import threading
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from hvd_trainer.rendezvous.endpoint import Endpoint
from hvd_trainer.utils.network import listen

PROGRAM = (
    "import sys; sys.path.append(sys.argv[1]); "
    "from hvd_trainer.rendezvous.store_server import main; main(int(sys.argv[2]))"
)
"""Without site-packages, whose start-up hooks take longer than the server itself."""
ENDS_S = 1.0
_LOCK = threading.Lock()
_SERVERS: dict[tuple[int, str, int], _ServerProcess] = {}
"""Of this process: by its number, since a fork is no owner of its parent's, the address and the wanted port."""


@dataclass
class _ServerProcess:
    """A process that serves, and how many tickets to it are in use."""

    process: subprocess.Popen[bytes]
    port: int
    tickets: int = 0


def serve(address: str, port: int = 0, *, token: str | None = None) -> Endpoint:
    """Starts a server in a process of its own, or goes on using it, and has it take one more token.

    It ends with this process, or when all its tickets are retired.

    Args:
        address: of this machine, to which the server is bound; empty: to all that it has.
        port: 0: one that the system picks.
        token: None: a new one.

    Raises:
        OSError: the port is in use, or the address is not of this machine.
    """
    key = (os.getpid(), address, port)
    ticket_token = token or secrets.token_hex(16)
    with _LOCK:
        server = _SERVERS.get(key)
        if server is None or server.process.poll() is not None:
            server = _SERVERS[key] = _start(address, port)
        server.tickets += 1
        pipe = server.process.stdin
        assert pipe is not None
        pipe.write(f"{ticket_token}\n".encode())
    return Endpoint(address, server.port, ticket_token)


def release(ticket: Endpoint) -> None:
    """Ends the server that this process has for a ticket, unless there are other tickets to it."""
    with _LOCK:
        for key, server in list(_SERVERS.items()):
            if key[:2] == (os.getpid(), ticket.host) and server.port == ticket.port:
                server.tickets -= 1
                if not server.tickets:
                    del _SERVERS[key]
                    _end(server.process)


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.communicate(timeout=ENDS_S)
    except subprocess.TimeoutExpired:  # another process that was forked meanwhile has the pipe open, too
        process.kill()
        process.wait()


def _start(address: str, port: int) -> _ServerProcess:
    with listen(address, port) as listener:
        number = listener.fileno()
        # Its outputs are not ours: whoever reads ours to the end would wait for it, too.
        process = subprocess.Popen(
            [sys.executable, "-ISc", PROGRAM, str(Path(__file__).parents[2]), str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(number,),
            bufsize=0,
        )
        return _ServerProcess(process, listener.getsockname()[1])


def connect(ticket: Endpoint, timeout: timedelta) -> dist.Store:
    """The store, for a rank with a ticket to it; it waits for the server to come.

    Raises:
        torch.distributed.DistError: nobody answers there in time, or the token is not that of the server.
    """
    client = dist.TCPStore(ticket.host, ticket.port, is_master=False, timeout=timeout)
    store = dist.PrefixStore(ticket.token, client)
    # By the first key the server knows this rank, and does not take it for one of too many strangers.
    store.check(["joined"])
    return store
