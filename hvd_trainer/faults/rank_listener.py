"""Where rank 0's monitor accepts the channels of the other ranks."""

from __future__ import annotations

import secrets
import selectors
import socket
from collections.abc import Callable

from hvd_trainer.faults.messages import MAX_HELLO_BYTES, MAX_MESSAGE_BYTES, Channel, Hello, Message
from hvd_trainer.utils.descriptors import pause_if_none_left

MAX_UNAUTHENTICATED = 256
"""Connections that have not sent the token yet, beyond as many as there are ranks. The oldest is closed first."""
SEND_TIMEOUT_S = 1.0


class RankListener:
    """Accepts one channel of each other rank, and then no more. Connections without the token are closed.

    Args:
        on_rank: is called with a rank, its channel, and messages that came with the first one.

    Attributes:
        token: what a rank must send first.
        port: where it listens.
    """

    def __init__(
        self,
        address: str,
        size: int,
        selector: selectors.BaseSelector,
        on_rank: Callable[[int, Channel, list[Message]], None],
    ) -> None:
        self.token = secrets.token_hex(16)
        self._max_unauthenticated = MAX_UNAUTHENTICATED + size
        self._awaited = set(range(1, size))
        self._selector, self._on_rank = selector, on_rank
        self._unauthenticated: dict[Channel, None] = {}
        self._socket = socket.create_server((address, 0))
        self.port: int = self._socket.getsockname()[1]
        selector.register(self._socket, selectors.EVENT_READ, self._accept)

    def _accept(self) -> None:
        try:
            connection, _ = self._socket.accept()
        except OSError as error:
            if self._unauthenticated:
                self._drop(next(iter(self._unauthenticated)))
            pause_if_none_left(error)
            return
        connection.settimeout(SEND_TIMEOUT_S)
        self.add(connection)

    def add(self, connection: socket.socket) -> Channel:
        """Wait for the token on a new connection."""
        channel = Channel(connection, max_bytes=MAX_HELLO_BYTES)
        self._unauthenticated[channel] = None
        self._selector.register(channel, selectors.EVENT_READ, lambda: self._authenticate(channel))
        if len(self._unauthenticated) > self._max_unauthenticated:
            self._drop(next(iter(self._unauthenticated)))
        return channel

    def _authenticate(self, channel: Channel) -> None:
        """Read the first message, which has the token and the rank."""
        if channel not in self._unauthenticated:
            return  # dropped since the selector returned
        messages = channel.receive()
        if messages == []:
            return  # not a whole line yet
        match messages:
            case [Hello(token=token, rank=rank), *rest] if (
                secrets.compare_digest(ascii(token), ascii(self.token)) and rank in self._awaited
            ):
                del self._unauthenticated[channel]
                self._selector.unregister(channel)
                channel.max_bytes = MAX_MESSAGE_BYTES
                self._awaited.discard(rank)
                self._on_rank(rank, channel, rest)
            case _:
                self._drop(channel)
        if not self._awaited:
            self.close()

    def _drop(self, channel: Channel) -> None:
        del self._unauthenticated[channel]
        self._selector.unregister(channel)
        channel.close()

    def close(self) -> None:
        """Stop listening, and close connections without the token."""
        if self._socket.fileno() >= 0:
            self._selector.unregister(self._socket)
            self._socket.close()
        for channel in list(self._unauthenticated):
            self._drop(channel)
