"""The process that serves a job's store, beside rank 0, to those who know a token of the job; PyTorch's own server
takes everybody's word.

    rank 0 ---- a pipe: tokens, one a line ----> server <---- ranks        SET /3f...e1/peer/2 "..."
                                                        <---- Horovod      PUT /3f...e1/horovod:40123/global/2
                                                        <---- others       anything: closed

A process of its own, so that what comes from the network is not read by one that trains, and so that a rank which
waits for the store does not hold up the one that would answer it. It ends when the pipe does, with rank 0. It
imports nothing but a little of the standard library: jobs wait for its start.
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
from hvd_trainer.rendezvous.store_protocol import steps

MAX_UNAUTHENTICATED = 4096
"""Connections that have named no key with a token yet: so many ranks may come at once. The oldest goes first."""
LOOK_UP_S = 0.5
"""How often the server looks whether rank 0 is still there, in case that others have its pipe open, too."""


class StoreServer:
    """All connections at a listener."""

    def __init__(self, listener: socket.socket, pipe: int) -> None:
        self._listener, self._pipe, self._told = listener, pipe, b""
        self._store = Store()
        self._strangers: dict[Connection, None] = {}
        self._selector = selectors.DefaultSelector()
        self._parent = os.getppid()
        listener.setblocking(False)
        self._selector.register(pipe, selectors.EVENT_READ)
        self._selector.register(listener, selectors.EVENT_READ)

    def serve(self) -> None:
        """Serves until rank 0 has ended."""
        while os.getppid() == self._parent:
            ready = self._selector.select(LOOK_UP_S)
            # What rank 0 says comes first: whom it has told a token may be here already.
            for key, _ in ready:
                if key.fileobj == self._pipe and not self._listen():
                    return
            for key, events in ready:
                if key.fileobj is self._listener:
                    self._accept()
                # One that is closed meanwhile, as the oldest of too many strangers, has no number any more.
                elif isinstance(key.data, Connection) and key.data.line.fileno() >= 0:
                    self._talk(key.data, events)
            self._answer()

    def _listen(self) -> bool:
        """Takes the tokens from the pipe; whether there may be more."""
        data = os.read(self._pipe, 1 << 16)
        *tokens, self._told = (self._told + data).split(b"\n")
        self._store.tokens.update(tokens)
        return bool(data)

    def _accept(self) -> None:
        try:
            line, _ = self._listener.accept()
        except OSError:
            # It has gone again, or too many files are open.
            self._close_a_stranger()
            return
        line.setblocking(False)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = Connection(line, self._store, steps)
        self._strangers[connection] = None
        self._selector.register(line, selectors.EVENT_READ, connection)
        if len(self._strangers) > MAX_UNAUTHENTICATED:
            self._close_a_stranger()

    def _close_a_stranger(self) -> None:
        for connection in self._strangers:
            self._close(connection)
            return

    def _talk(self, connection: Connection, events: int) -> None:
        try:
            if events & selectors.EVENT_READ:
                connection.receive()
            if events & selectors.EVENT_WRITE:
                self._store.answered.add(connection)
        except (RefusedError, OSError, ValueError, struct.error):
            self._close(connection)
        if not connection.stranger:
            self._strangers.pop(connection, None)

    def _answer(self) -> None:
        """Sends to all for whom something has come up; what they do not take waits until they do."""
        for connection in list(self._store.answered):
            self._store.answered.discard(connection)
            try:
                connection.flush()
            except BlockingIOError:
                pass
            except OSError:
                self._close(connection)
                continue
            if connection.ended and not connection.owes:
                self._close(connection)
                continue
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.owes else 0)
            self._selector.modify(connection.line, events, connection)

    def _close(self, connection: Connection) -> None:
        self._strangers.pop(connection, None)
        self._selector.unregister(connection.line)
        connection.close()


def main(listener: int) -> None:
    """Serves at the listener with that file descriptor; tokens come through standard input."""
    # They are for rank 0 and its kind: it may want to say goodbye to the others.
    for name in ("SIGHUP", "SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2"):
        signal.signal(signal.Signals[name], signal.SIG_IGN)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # more than this system gives a process
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    StoreServer(socket.socket(fileno=listener), sys.stdin.fileno()).serve()
