"""A connection between the monitors of two ranks: messages as JSON, one per line, over a socket."""

from __future__ import annotations

import os
import socket
import weakref
from contextlib import suppress

import msgspec

from hvd_trainer.faults.messages import Message

MAX_HELLO_BYTES = 1 << 12
"""Of the first message, which has the token."""
MAX_MESSAGE_BYTES = 1 << 24
"""Of a message of a rank, which may have its stacks."""
_decoder = msgspec.json.Decoder(Message)
_open_channels: weakref.WeakSet[Channel] = weakref.WeakSet()


class Channel:
    """One end of a connection.

    Args:
        connection: the socket.
        max_bytes: of a message; after a longer one the channel counts as broken.
    """

    def __init__(self, connection: socket.socket, max_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self._socket = connection
        self.max_bytes = max_bytes
        self._unread = b""
        _open_channels.add(self)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Send a message. Errors are ignored: that the other end is gone shows in `receive`."""
        with suppress(OSError):
            self._socket.sendall(msgspec.json.encode(message) + b"\n")

    def receive(self) -> list[Message] | None:
        """Return the messages that have arrived; None if the other end is gone, or sends something else."""
        try:
            data = self._socket.recv(1 << 16)
        except OSError:
            return None
        *lines, self._unread = (self._unread + data).split(b"\n")
        try:
            messages = [_decoder.decode(line) for line in lines]
        except (msgspec.MsgspecError, RecursionError):
            return None
        return messages if data and len(self._unread) < self.max_bytes else None

    def close(self) -> None:
        self._socket.close()


def _close_in_child() -> None:
    """Close inherited channels in a forked process: an open copy would hide the death of its parent's end."""
    for channel in list(_open_channels):
        channel.close()


os.register_at_fork(after_in_child=_close_in_child)
