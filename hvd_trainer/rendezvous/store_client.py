"""How rank 0, or the parent of all ranks, starts the server of a job's store, and how all ranks connect to it."""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from hvd_trainer.launch.world import World, rank_variables
from hvd_trainer.rendezvous.endpoint import Endpoint
from hvd_trainer.utils.network import LOOPBACK, listen

if TYPE_CHECKING:
    import torch.distributed as dist

SERVER_PROGRAM = (
    "import sys; sys.path.append(sys.argv[1]); "
    "from hvd_trainer.rendezvous.store_server import main; main(int(sys.argv[2]))"
)
"""Run without site-packages, whose start-up hooks take longer than the server itself."""
EXIT_TIMEOUT_S = 1.0
ANSWER_TIMEOUT_S = 5.0
RUN_STORE = "HVD_TRAINER_STORE"
"""Variable with the store's endpoint, for ranks that a process of this package starts on its own machine."""
_lock = threading.Lock()
_servers: dict[tuple[int, str, int], _ServerProcess] = {}
"""Servers of this process by its process number (a fork does not own its parent's), address and requested port."""


@dataclass
class _ServerProcess:
    """A server, and the number of tokens that it serves."""

    process: subprocess.Popen[bytes]
    port: int
    num_tokens: int = 0


def serve(address: str, port: int = 0, *, token: str | None = None) -> Endpoint:
    """Start a server in a process of its own, or reuse this process's, and add a token to it.

    It ends with this process, or when all its endpoints are released.

    Args:
        address: of this machine, to listen at; empty: all addresses.
        port: 0: any.
        token: None: a new one.

    Raises:
        OSError: the port is in use, or the address is not of this machine.
    """
    key = (os.getpid(), address, port)
    endpoint_token = token or secrets.token_hex(16)
    with _lock:
        server = _servers.get(key)
        if server is None or server.process.poll() is not None:
            server = _servers[key] = _start(address, port)
        server.num_tokens += 1
        pipe = server.process.stdin
        assert pipe is not None
        pipe.write(f"{endpoint_token}\n".encode())
    return Endpoint(address, server.port, endpoint_token)


def release(endpoint: Endpoint) -> None:
    """End this process's server for an endpoint, unless it has other endpoints."""
    with _lock:
        for key, server in list(_servers.items()):
            if key[:2] == (os.getpid(), endpoint.host) and server.port == endpoint.port:
                server.num_tokens -= 1
                if not server.num_tokens:
                    del _servers[key]
                    _end(server.process)


@contextmanager
def local_store() -> Iterator[Endpoint]:
    """Serve the store by which the ranks of `rank_environment` find each other, while the context is open."""
    endpoint = serve(LOOPBACK)
    try:
        yield endpoint
    finally:
        release(endpoint)


def rank_environment(rank: int, size: int, endpoint: Endpoint) -> dict[str, str]:
    """Return the variables that make a process a rank on this machine, and with which it finds the others."""
    world = World(rank=rank, size=size, local_rank=rank, local_size=size)
    return {**rank_variables("run", world), RUN_STORE: str(endpoint)}


def _start(address: str, port: int) -> _ServerProcess:
    with listen(address, port) as listener:
        descriptor = listener.fileno()
        # The server does not inherit stdout and stderr: whoever reads this process's output to its end would wait
        # for the server, too.
        process = subprocess.Popen(
            [sys.executable, "-ISc", SERVER_PROGRAM, str(Path(__file__).parents[2]), str(descriptor)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(descriptor,),
            bufsize=0,
        )
        return _ServerProcess(process, listener.getsockname()[1])


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.communicate(timeout=EXIT_TIMEOUT_S)
    except subprocess.TimeoutExpired:  # another process, forked meanwhile, has the pipe open, too
        process.kill()
        process.wait()


def is_served(endpoint: Endpoint) -> bool:
    """Return True if a server answers at an endpoint that proves that it knows the token, which is not sent.

    The endpoint may be that of a job that was killed, and another program may have its port since.
    """
    challenge, address = secrets.token_hex(16), (endpoint.host, endpoint.port)
    with suppress(OSError), socket.create_connection(address, ANSWER_TIMEOUT_S) as connection:
        connection.sendall(f"PROVE {challenge}\r\n\r\n".encode())
        proof = hmac.digest(endpoint.token.encode(), challenge.encode(), "sha256")
        return proof in connection.recv(1 << 16)
    return False


def connect(endpoint: Endpoint, timeout: timedelta) -> dist.Store:
    """Return the store at an endpoint; wait for its server to start.

    Raises:
        torch.distributed.DistError: the server does not answer in time, or does not know the token.
    """
    import torch.distributed as dist  # a parent of ranks starts them sooner without it

    client = dist.TCPStore(endpoint.host, endpoint.port, is_master=False, timeout=timeout)
    store = dist.PrefixStore(endpoint.token, client)
    # The first key authenticates this connection: the server closes unauthenticated ones if there are too many.
    store.check(["joined"])
    return store
