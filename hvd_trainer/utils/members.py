"""Connections between the members of a group: who listens accepts those that send its token, and nobody else."""

from __future__ import annotations

import hmac
import socket
import struct
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing.connection import wait

from hvd_trainer.utils.descriptors import pause_if_none_left

TOKEN_BYTES = 16
HELLO = struct.Struct(f"<{TOKEN_BYTES}sI")
"""First message of a connection: the token of the member that listens, and the number of the one that connects."""
CHECK_S = 1.0
MAX_UNAUTHENTICATED = 256
"""Connections that have not sent the token yet, beyond as many as there are members. The oldest are closed."""


def send_hello(connection: socket.socket, token: str, member: int) -> None:
    """Introduce a member to the one at the other end, whose token has 32 hexadecimal digits."""
    connection.sendall(HELLO.pack(bytes.fromhex(token), member))


def accept_members(
    listener: socket.socket, token: str, members: Iterable[int], on_wait: Callable[[], None]
) -> dict[int, socket.socket]:
    """Return a connection of each member. All that connect are heard at once: one that is silent holds up nobody.

    Args:
        on_wait: called about every second, or more often; may raise to give up.
    """
    awaited, accepted = set(members), dict[int, socket.socket]()
    unauthenticated: list[socket.socket] = []
    max_unauthenticated = MAX_UNAUTHENTICATED + len(awaited)
    listener.setblocking(False)
    try:
        while awaited:
            ready = wait([listener, *unauthenticated], CHECK_S)
            for connection in [each for each in unauthenticated if each in ready]:
                unauthenticated.remove(connection)
                member = _receive_hello(connection, token)
                if member in awaited:
                    awaited.discard(member)
                    accepted[member] = connection
                else:
                    connection.close()
            if listener in ready:
                _accept(listener, unauthenticated, max_unauthenticated)
            on_wait()
    except BaseException:
        unauthenticated += accepted.values()
        raise
    finally:
        for connection in unauthenticated:
            connection.close()
    return accepted


def _receive_hello(connection: socket.socket, token: str) -> int | None:
    """Return the number of a member; None if it is none, or more than the first packet would have its hello."""
    with suppress(OSError, struct.error):
        sent, member = HELLO.unpack(connection.recv(HELLO.size))
        if hmac.compare_digest(sent, bytes.fromhex(token)):
            return int(member)
    return None


def _accept(listener: socket.socket, unauthenticated: list[socket.socket], max_number: int) -> None:
    """Add a connection to the others; close the oldest one if there are too many, or no descriptor is left."""
    is_full = len(unauthenticated) >= max_number
    try:
        connection, _ = listener.accept()
        connection.setblocking(False)
        unauthenticated.append(connection)
    except OSError as error:
        is_full = bool(unauthenticated)
        pause_if_none_left(error)
    if is_full:
        unauthenticated.pop(0).close()
