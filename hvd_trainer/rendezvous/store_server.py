"""The process that serves a job's store, beside rank 0, to clients with a token (PyTorch's own server takes none).

    rank 0 ---- a pipe: tokens, one a line ----> server <---- ranks        SET /3f...e1/peer/2 "..."
                                                        <---- Horovod      PUT /3f...e1/horovod:40123/global/2
                                                        <---- others       anything: closed

It is a process of its own, so that input from the network is not parsed in a rank, and a rank that waits for the
store does not block the server. It ends when the pipe is closed, with rank 0. It imports only a few modules of the
standard library: each job waits for its start.
"""

from __future__ import annotations

import os
import resource
import selectors
import signal
import socket
import struct
import sys
from contextlib import suppress

from hvd_trainer.rendezvous.store_connection import Connection, RefusedError, Store
from hvd_trainer.rendezvous.store_protocol import handle_client
from hvd_trainer.utils.descriptors import pause_if_none_left

MAX_UNAUTHENTICATED = 4096
"""Connections that have not sent a key with a token: so many ranks may arrive at once. The oldest is closed."""
PARENT_CHECK_S = 0.5
"""How often the server checks that rank 0 is alive: other processes may have the pipe open, too."""


class StoreServer:
    """All connections of one listening socket."""

    def __init__(self, listener: socket.socket, pipe: int) -> None:
        self._listener, self._pipe, self._partial_token = listener, pipe, b""
        self._store = Store()
        self._unauthenticated: dict[Connection, None] = {}
        self._selector = selectors.DefaultSelector()
        self._parent = os.getppid()
        listener.setblocking(False)
        self._selector.register(pipe, selectors.EVENT_READ)
        self._selector.register(listener, selectors.EVENT_READ)

    def serve(self) -> None:
        """Serve until rank 0 has ended."""
        while os.getppid() == self._parent:
            ready = self._selector.select(PARENT_CHECK_S)
            # Tokens first: a rank that was given one may have sent it already.
            for key, _ in ready:
                if key.fileobj == self._pipe and not self._read_tokens():
                    return
            for key, events in ready:
                if key.fileobj is self._listener:
                    self._accept()
                # A connection that was closed in this turn, as the oldest unauthenticated one, has no descriptor.
                elif isinstance(key.data, Connection) and key.data.sock.fileno() >= 0:
                    self._handle(key.data, events)
            self._send_pending()

    def _read_tokens(self) -> bool:
        """Read tokens from the pipe; return False at its end."""
        data = os.read(self._pipe, 1 << 16)
        *tokens, self._partial_token = (self._partial_token + data).split(b"\n")
        self._store.tokens.update(tokens)
        return bool(data)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            # The client is gone again, or too many files are open.
            self._close_oldest_unauthenticated()
            pause_if_none_left(error)
            return
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = Connection(sock, self._store, handle_client)
        self._unauthenticated[connection] = None
        self._selector.register(sock, selectors.EVENT_READ, connection)
        if len(self._unauthenticated) > MAX_UNAUTHENTICATED:
            self._close_oldest_unauthenticated()

    def _close_oldest_unauthenticated(self) -> None:
        for connection in self._unauthenticated:
            self._close(connection)
            return

    def _handle(self, connection: Connection, events: int) -> None:
        try:
            if events & selectors.EVENT_READ:
                connection.receive()
            if events & selectors.EVENT_WRITE:
                self._store.pending.add(connection)
        except (RefusedError, OSError, LookupError, ValueError, struct.error):
            self._close(connection)
        if connection.is_authenticated:
            self._unauthenticated.pop(connection, None)

    def _send_pending(self) -> None:
        """Send new answers; what a client does not take yet waits until its socket is writable."""
        for connection in list(self._store.pending):
            self._store.pending.discard(connection)
            try:
                is_sent = connection.flush()
            except OSError:
                is_sent = connection.is_finished = True
            if is_sent and connection.is_finished:
                self._close(connection)
            else:
                events = selectors.EVENT_READ | (0 if is_sent else selectors.EVENT_WRITE)
                self._selector.modify(connection.sock, events, connection)

    def _close(self, connection: Connection) -> None:
        self._unauthenticated.pop(connection, None)
        self._selector.unregister(connection.sock)
        connection.close()


def main(listener: int) -> None:
    """Serve at the listening socket with that file descriptor; tokens are read from standard input."""
    # Signals to the process group are for rank 0, which may still need the store to leave the others.
    for name in ("SIGHUP", "SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2"):
        signal.signal(signal.Signals[name], signal.SIG_IGN)
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # more than the system allows
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
    StoreServer(socket.socket(fileno=listener), sys.stdin.fileno()).serve()
