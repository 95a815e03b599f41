"""A store's values, and one connection of a client, with what is unread and what is unsent."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Generator, Sequence

MAX_KEY_BYTES = 4096
"""In bytes; those of PyTorch have up to some hundred."""
MAX_UNAUTHENTICATED_BYTES = 2 * MAX_KEY_BYTES
"""What may be sent by one who has named no key with a token yet."""
READ_BYTES = 1 << 20
STOP_WAITING = b"\0"

Steps = Generator["int | bytes", bytes, None]
"""What to do with a connection's bytes: it asks for so many, or for all up to a mark, and is sent them."""


class RefusedError(Exception):
    """Whoever has sent that is no rank of ours."""


class Store:
    """Keys and values of all tokens, who waits for which, and whom there is something to send to."""

    def __init__(self) -> None:
        self.tokens: set[bytes] = set()
        self.values: dict[bytes, bytes] = {}
        self.answered: set[Connection] = set()
        self._waiting: dict[bytes, list[Connection]] = {}

    def admits(self, key: bytes) -> bool:
        """Keys are paths: `/TOKEN/...`."""
        return key[:1] == b"/" and key[1:].partition(b"/")[0] in self.tokens

    def set(self, key: bytes, value: bytes) -> None:
        self.values[key] = value
        for connection in self._waiting.pop(key, ()):
            connection.missing.discard(key)
            if not connection.missing:
                connection.send(STOP_WAITING)

    def wait(self, keys: Sequence[bytes], connection: Connection) -> None:
        self.wait_no_more(connection)
        connection.missing = {key for key in keys if key not in self.values}
        for key in connection.missing:
            self._waiting.setdefault(key, []).append(connection)
        if not connection.missing:
            connection.send(STOP_WAITING)

    def wait_no_more(self, connection: Connection) -> None:
        for key in connection.missing:
            self._waiting[key].remove(connection)
            if not self._waiting[key]:
                del self._waiting[key]
        connection.missing = set()


class Connection:
    """One client: what it has sent and not been read yet, and what it has not taken yet of the answers."""

    def __init__(self, line: socket.socket, store: Store, protocol: Callable[[Connection], Steps]) -> None:
        self.line, self.store = line, store
        self.stranger = True
        self.missing: set[bytes] = set()
        self._out: deque[memoryview] = deque()
        self.ended = False
        self._in, self._came = bytearray(), 0
        self._steps = protocol(self)
        self._needed = next(self._steps)

    def receive(self) -> None:
        """Reads what has come, and answers.

        Raises:
            RefusedError: nobody of ours sends that.
            OSError: the connection is broken, or over.
        """
        data = self.line.recv(MAX_UNAUTHENTICATED_BYTES - self._came + 1 if self.stranger else READ_BYTES)
        if not data:
            raise ConnectionResetError
        self._in += data
        self._came += len(data)
        try:
            while not self.ended and (size := self._available()):
                part = bytes(self._in[:size])
                del self._in[:size]
                self._needed = self._steps.send(part)
        except StopIteration:
            self.ended = True
        if self.stranger and self._came > MAX_UNAUTHENTICATED_BYTES:
            raise RefusedError

    def _available(self) -> int:
        """The size of what is asked for next, or 0 as long as that has not come whole."""
        if isinstance(self._needed, bytes):
            end = self._in.find(self._needed)
            return 0 if end < 0 else end + len(self._needed)
        return self._needed if len(self._in) >= self._needed else 0

    def admit(self, key: bytes) -> None:
        """Who names a key with a token is of ours, and stays so: PyTorch has keys without, on the same line.

        Raises:
            RefusedError: it has named none yet, nor does now.
        """
        if self.stranger and not self.store.admits(key):
            raise RefusedError
        self.stranger = False

    def send(self, data: bytes) -> None:
        self._out.append(memoryview(data))
        self.store.answered.add(self)

    @property
    def owes(self) -> bool:
        """Whether answers are left that the other side has not taken."""
        return bool(self._out)

    def flush(self) -> None:
        """Sends as much as the other side takes."""
        while self._out:
            sent = self.line.send(self._out[0])
            self._out[0] = self._out[0][sent:]
            if not self._out[0]:
                self._out.popleft()

    def close(self) -> None:
        self.store.wait_no_more(self)
        self.store.answered.discard(self)
        self.line.close()
