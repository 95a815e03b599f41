"""A connection between the monitors of two ranks: messages as JSON, one per line, over a socket."""

from __future__ import annotations

import socket
from contextlib import suppress

import msgspec

from hvd_trainer.faults.messages import Message
from hvd_trainer.utils.network import close_in_children

MAX_HELLO_BYTES = 1 << 12
"""Of the first message, which has the token."""
MAX_MESSAGE_BYTES = 1 << 24
"""Of a message of a rank, which may have its stacks."""
_decoder = msgspec.json.Decoder(Message)


class Channel:
    """One end of a connection.

    Args:
        max_bytes: of a message; after a longer one the channel counts as broken.
    """

    def __init__(self, connection: socket.socket, max_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self._socket = connection
        self.max_bytes = max_bytes
        self._unread = b""
        close_in_children(connection)

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
