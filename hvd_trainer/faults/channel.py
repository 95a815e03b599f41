"""Messages between two ranks: JSON objects, one per line, over a socket."""

from __future__ import annotations

import json
import os
import socket
import weakref
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

_open: weakref.WeakSet[Channel] = weakref.WeakSet()


LONGEST_GREETING, LONGEST_MESSAGE = 1 << 12, 1 << 24
"""In bytes: of those who have yet to say the token, and of ranks, which send their stacks."""


class Channel:
    """One end of a connection.

    Args:
        connection: the socket.
        most_bytes: the longest message that is read.
    """

    def __init__(self, connection: socket.socket, most_bytes: int = LONGEST_MESSAGE) -> None:
        self._socket = connection
        self.most_bytes = most_bytes
        self._unread = b""
        _open.add(self)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends. That the other end is gone shows when it is read from."""
        with suppress(OSError):
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]] | None:
        """What has come; None once the other end is gone, or does not speak our language."""
        try:
            data = self._socket.recv(1 << 16)
        except OSError:
            return None
        *lines, self._unread = (self._unread + data).split(b"\n")
        try:
            messages = [json.loads(line) for line in lines]
        except (ValueError, RecursionError):
            return None
        sound = (
            data and len(self._unread) < self.most_bytes and all(isinstance(message, dict) for message in messages)
        )
        return messages if sound else None

    def close(self) -> None:
        self._socket.close()


def _in_a_fork() -> None:
    """A loader process that keeps its parent's lines open would hide its parent's end."""
    for line in list(_open):
        line.close()


os.register_at_fork(after_in_child=_in_a_fork)
