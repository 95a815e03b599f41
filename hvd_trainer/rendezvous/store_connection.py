"""The values of a store, and one client's connection to it with its unread and unsent bytes."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress

MAX_KEY_BYTES = 4096
"""PyTorch's keys have some hundred bytes."""
MAX_UNAUTHENTICATED_BYTES = 2 * MAX_KEY_BYTES
"""How much a client may send before a key with a token."""
READ_BYTES = 1 << 20
STOP_WAITING = b"\0"

Handler = Generator["int | bytes", bytes, None]
"""Handles a client's messages: yields a number of bytes to read or a delimiter, and is sent the bytes."""


class RefusedError(Exception):
    """The client is no rank of this job."""


class Store:
    """Keys and values of all tokens, and the connections that wait for keys.

    Attributes:
        tokens: keys must begin with one of them.
        values: by key.
        pending: connections with new bytes to send.
    """

    def __init__(self) -> None:
        self.tokens: set[bytes] = set()
        self.values: dict[bytes, bytes] = {}
        self.pending: set[Connection] = set()
        self._waiting: dict[bytes, list[Connection]] = {}

    def has_token(self, key: bytes) -> bool:
        """Return True if a key is a path of the form `/TOKEN/...` with a known token."""
        return key[:1] == b"/" and key[1:].partition(b"/")[0] in self.tokens

    def set(self, key: bytes, value: bytes) -> None:
        """Set a value, and answer connections for which it was the last key that they waited for."""
        self.values[key] = value
        for connection in self._waiting.pop(key, ()):
            connection.awaited.discard(key)
            if not connection.awaited:
                connection.send(STOP_WAITING)

    def wait(self, keys: Sequence[bytes], connection: Connection) -> None:
        """Answer a connection once all keys are set."""
        self.cancel_wait(connection)
        connection.awaited = {key for key in keys if key not in self.values}
        for key in connection.awaited:
            self._waiting.setdefault(key, []).append(connection)
        if not connection.awaited:
            connection.send(STOP_WAITING)

    def cancel_wait(self, connection: Connection) -> None:
        """Forget the keys that a connection waits for."""
        for key in connection.awaited:
            self._waiting[key].remove(connection)
            if not self._waiting[key]:
                del self._waiting[key]
        connection.awaited = set()


class Connection:
    """The connection of one client.

    Attributes:
        is_authenticated: whether it has sent a key with a token.
        awaited: keys that it waits for.
        is_finished: whether it is to be closed once all is sent.
    """

    def __init__(self, sock: socket.socket, store: Store, protocol: Callable[[Connection], Handler]) -> None:
        self.sock, self.store = sock, store
        self.is_authenticated = False
        self.awaited: set[bytes] = set()
        self.is_finished = False
        self._unsent: deque[memoryview] = deque()
        self._unread, self._received_bytes = bytearray(), 0
        self._handler = protocol(self)
        self._needed = next(self._handler)

    def receive(self) -> None:
        """Read what has arrived, and handle all complete messages.

        Raises:
            RefusedError: no rank of this job sends that.
            OSError: the connection is broken or closed.
        """
        limit = READ_BYTES if self.is_authenticated else MAX_UNAUTHENTICATED_BYTES - self._received_bytes + 1
        data = self.sock.recv(limit)
        if not data:
            raise ConnectionResetError
        self._unread += data
        self._received_bytes += len(data)
        try:
            while not self.is_finished and (size := self._available()):
                part = bytes(self._unread[:size])
                del self._unread[:size]
                self._needed = self._handler.send(part)
        except StopIteration:
            self.is_finished = True
        if not self.is_authenticated and self._received_bytes > MAX_UNAUTHENTICATED_BYTES:
            raise RefusedError

    def _available(self) -> int:
        """Return the size of what the handler needs next, or 0 as long as it has not arrived completely."""
        if isinstance(self._needed, bytes):
            end = self._unread.find(self._needed)
            return 0 if end < 0 else end + len(self._needed)
        return self._needed if len(self._unread) >= self._needed else 0

    def authenticate(self, key: bytes) -> None:
        """Accept a key; after the first one with a token also keys without, which PyTorch uses on the connection.

        Raises:
            RefusedError: neither this key nor an earlier one has a token.
        """
        if not self.is_authenticated and not self.store.has_token(key):
            raise RefusedError
        self.is_authenticated = True

    def send(self, data: bytes) -> None:
        """Queue an answer."""
        self._unsent.append(memoryview(data))
        self.store.pending.add(self)

    def flush(self) -> bool:
        """Send as much as the socket takes for now; return whether that is all.

        Raises:
            OSError: the connection is broken.
        """
        with suppress(BlockingIOError):
            while self._unsent:
                sent = self.sock.send(self._unsent[0])
                self._unsent[0] = self._unsent[0][sent:]
                if not self._unsent[0]:
                    self._unsent.popleft()
        return not self._unsent

    def close(self) -> None:
        self.store.cancel_wait(self)
        self.store.pending.discard(self)
        self.sock.close()
