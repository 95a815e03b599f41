"""The process that serves a job's store, beside rank 0, to clients with a token (PyTorch's own server takes none).

    rank 0 ---- a pipe: tokens, one a line ----> server <---- ranks        SET /3f...e1/peer/2 "..."
                                                        <---- Horovod      PUT /3f...e1/horovod:40123/global/2
                                                        <---- others       anything: closed

It is a process of its own, so that input from the network is not parsed in a rank, and a rank that waits for the
store does not block the server. It ends when the pipe is closed, with rank 0. It imports modules of the standard
library only: each job waits for its start, of which asyncio takes 0.1 s.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import sys
from contextlib import suppress

from hvd_trainer.rendezvous.store_protocol import Client, Store
from hvd_trainer.utils.descriptors import NONE_LEFT, PAUSE_S

MAX_UNAUTHENTICATED = 4096
"""Connections that have not sent a key with a token: so many ranks may arrive at once. The oldest is closed."""
PARENT_CHECK_S = 0.5
"""How often the server checks that rank 0 is alive: other processes may have the pipe open, too."""


class StoreServer:
    """Serves all connections of one listening socket, until a pipe is closed from which it reads tokens."""

    def __init__(self, listener: socket.socket, pipe: int) -> None:
        self._listener, self._pipe = listener, pipe
        self._store = Store(pipe)
        self._parent = os.getppid()
        listener.setblocking(False)

    async def serve(self) -> None:
        """Serve until rank 0 has ended."""
        loop = asyncio.get_running_loop()
        pipe_ended: asyncio.Future[None] = loop.create_future()

        def read_tokens() -> None:
            if not self._store.read_tokens():
                loop.remove_reader(self._pipe)
                pipe_ended.set_result(None)

        loop.add_reader(self._pipe, read_tokens)
        accepting = loop.create_task(self._accept())
        while os.getppid() == self._parent and not (pipe_ended.done() or accepting.done()):
            await asyncio.wait([pipe_ended], timeout=PARENT_CHECK_S)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(self._listener)
            except OSError as error:
                # The client is gone again, or too many files are open.
                self._close_oldest_unauthenticated()
                await asyncio.sleep(PAUSE_S if error.errno in NONE_LEFT else 0)
                continue
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            Client(sock, self._store)
            await asyncio.sleep(0)  # a task that is cancelled before its first step would not close the connection
            if len(self._store.unauthenticated) > MAX_UNAUTHENTICATED:
                self._close_oldest_unauthenticated()

    def _close_oldest_unauthenticated(self) -> None:
        if (oldest := next(iter(self._store.unauthenticated), None)) is not None:
            oldest.close()


def main(listener: int) -> None:
    """Serve at the listening socket with that file descriptor; tokens are read from standard input."""
    # Signals to the process group are for rank 0, which may still need the store to leave the others.
    for name in ("SIGHUP", "SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2"):
        signal.signal(signal.Signals[name], signal.SIG_IGN)
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # more than the system allows
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
    asyncio.run(StoreServer(socket.socket(fileno=listener), sys.stdin.fileno()).serve())
