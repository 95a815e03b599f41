"""Messages between the monitors of rank 0 and of the other ranks, and the connections that they travel by.

to rank 0       Alive, RankEnded, Stacks, Left, Done
from rank 0     Alive, StacksRequest, JobEnded, Left, Bye
"""

from __future__ import annotations

import socket
from contextlib import suppress

import msgspec
from msgspec import Struct

from hvd_trainer.faults.collectives import CollectiveCall
from hvd_trainer.faults.root_cause import Event, Heartbeat, RootCause
from hvd_trainer.utils.network import close_in_children

MAX_MESSAGE_BYTES = 1 << 24
"""Limit of a message, which may have a rank's stacks. After a longer one a channel counts as broken."""


class _Message(Struct, kw_only=True, tag_field="kind", tag=str.lower):
    """A JSON object whose `kind` is the class's name in lower case."""


class Alive(_Message):
    """Shows that the sender is alive."""

    heartbeat: Heartbeat | None = None
    """None from rank 0, whose monitor decides"""


class RankEnded(_Message):
    """The training on this rank has ended before its time, or is about to."""

    event: Event
    is_users: bool = False
    """whether it is a user's mistake, which all ranks find alike"""
    heartbeat: Heartbeat | None = None
    calls: list[CollectiveCall] = []
    """the rank's last ones, if the error may be that another one did not take part"""
    line: str = ""
    """of the user's own code where it was raised"""


class StacksRequest(_Message):
    """Asks for the stacks and collectives of the receiver, and for the stacks of silent ranks on its machine."""

    silent: tuple[int, ...]


class Stacks(_Message):
    """The Python stacks of a rank, and its last collectives unless it is silent."""

    rank: int
    text: str
    calls: list[CollectiveCall] = []
    line: str = ""
    """of the user's own code that the main thread executes"""


class JobEnded(_Message):
    """The job ends; all ranks exit."""

    cause: RootCause
    exit_in_s: float


class Left(_Message):
    """A rank has left a call that all ranks make, such as `fit`; from rank 0: all have, some by an error."""

    number: int
    """of the call, from 0"""
    ended: RankEnded | None = None
    """the error by which it has left, which its script may catch"""


class Done(_Message):
    """A rank has come to its end, and waits for the others' or disconnects; rank 0 passes it on to all."""

    rank: int
    where: str = ""
    """how and where it has ended, if that was not after its last line"""
    calls: list[CollectiveCall] = []
    """the last ones of that rank, which begins no more"""


class Bye(_Message):
    """All ranks are done, or rank 0 disconnects because the job is over."""


Message = Alive | RankEnded | StacksRequest | Stacks | JobEnded | Left | Done | Bye
_decoder = msgspec.json.Decoder(Message)


class Channel:
    """One end of a connection: messages as JSON, one per line; what arrives is checked against their types."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
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
        return messages if data and len(self._unread) < MAX_MESSAGE_BYTES else None

    def close(self) -> None:
        self._socket.close()
