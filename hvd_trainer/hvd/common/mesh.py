"""Small messages between the members of a process set, over a TCP connection of each pair.

The thread that waits for the messages sends and receives them itself. Gloo wakes a thread of its own on both
sides, which takes ten times as long (350 us instead of 30 us for two ranks on one host).
"""

from __future__ import annotations

import secrets
import select
import socket
import struct
from collections.abc import Callable
from contextlib import suppress

import torch.distributed as dist

from hvd_trainer.errors import LaunchError
from hvd_trainer.rendezvous.endpoint import Endpoint, parse_endpoint
from hvd_trainer.utils import network
from hvd_trainer.utils.members import CHECK_S, TOKEN_BYTES, accept_members, send_hello

LENGTH = struct.Struct("<I")
Unsent = dict[socket.socket, memoryview]
"""The rest of the message to each member."""


class Mesh:
    """Exchanges messages between the members; one thread at a time.

    Args:
        store: of this process set alone.
        member: index of this process in it.
        address: of this host, at which the others can connect.
        on_wait: called about every second while this rank waits; may raise to give up.

    Raises:
        LaunchError: this host cannot connect to another member's.
    """

    def __init__(
        self, store: dist.Store, member: int, size: int, *, address: str, on_wait: Callable[[], None]
    ) -> None:
        self._size, self._on_wait = size, on_wait
        with network.listen(address, 0) as listener:
            token = secrets.token_hex(TOKEN_BYTES)
            store.set(f"mesh {member}", str(Endpoint(address, listener.getsockname()[1], token)))
            connections = {other: _connect(store, other, member) for other in range(member)}
            connections |= accept_members(listener, token, range(member + 1, size), on_wait)
        for connection in connections.values():
            _prepare(connection)
        # At the same time each sends to the member behind it and receives from the one before it, then to the next
        # one behind that: large messages do not wait for each other in a circle.
        distances = range(1, size)
        self._connections = {other: connections[other] for other in ((member - d) % size for d in distances)}
        """in the order in which this member receives; it sends in the opposite one"""

    def all_gather(self, message: bytes) -> list[bytes | bytearray]:
        """Return the messages of all members, of any size.

        Raises:
            ConnectionError: a member is gone.
        """
        data = memoryview(LENGTH.pack(len(message)) + message)
        unsent = dict.fromkeys(reversed(self._connections.values()), data)
        for connection in [*unsent]:
            _send_some(connection, unsent)
        messages: list[bytes | bytearray] = [message] * self._size
        for other, connection in self._connections.items():
            (size,) = LENGTH.unpack(self._read(connection, LENGTH.size, unsent))
            messages[other] = self._read(connection, size, unsent)
        while unsent:
            self._send_until_readable(None, unsent)
        return messages

    def _read(self, connection: socket.socket, size: int, unsent: Unsent) -> bytearray:
        data = bytearray()
        while len(data) < size:
            # Two members that both wait until the other one reads would wait for ever.
            while unsent and not self._send_until_readable(connection, unsent):
                pass
            try:
                part = connection.recv(size - len(data), 0 if unsent else socket.MSG_WAITALL)
            except BlockingIOError:  # CHECK_S have passed
                self._on_wait()
                continue
            if not part:
                raise ConnectionError("another rank has closed its connection: it has ended, or was killed.")
            data += part
        return data

    def _send_until_readable(self, reading: socket.socket | None, unsent: Unsent) -> bool:
        """Send more where there is space, and return whether there is something to read on a connection."""
        poll = select.poll()
        for connection in unsent:
            poll.register(connection, select.POLLOUT)
        if reading is not None:
            poll.register(reading, select.POLLIN | (select.POLLOUT if reading in unsent else 0))
        ready = dict(poll.poll(CHECK_S * 1000))
        if not ready:
            self._on_wait()
        for connection in [*unsent]:
            if ready.get(connection.fileno(), 0) & ~select.POLLIN:
                _send_some(connection, unsent)
        return reading is not None and bool(ready.get(reading.fileno(), 0) & ~select.POLLOUT)

    def abort(self) -> None:
        """Break the connections, so that the threads that wait here and in other ranks get an error."""
        for connection in self._connections.values():
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connections. Nothing may be under way."""
        for connection in self._connections.values():
            connection.close()


def _send_some(connection: socket.socket, unsent: Unsent) -> None:
    """Send as much as fits into a connection's buffers."""
    try:
        unsent[connection] = unsent[connection][connection.send(unsent[connection], socket.MSG_DONTWAIT) :]
    except BlockingIOError:
        return
    except OSError:  # shows when this member's message is read
        del unsent[connection]
        return
    if not unsent[connection]:
        del unsent[connection]


def _connect(store: dist.Store, other: int, member: int) -> socket.socket:
    endpoint = parse_endpoint(store.get(f"mesh {other}").decode())
    try:
        connection = socket.create_connection((endpoint.host, endpoint.port))
    except OSError as error:
        raise LaunchError(
            f"{socket.gethostname()} cannot connect to another rank, at {endpoint.netloc} ({error}). The "
            f"hosts of a job must reach each other at all ports. If they have several networks, name the one that "
            f"joins them, such as HOROVOD_GLOO_IFACE=eth0"
        ) from error
    send_hello(connection, endpoint.token, member)
    return connection


def _prepare(connection: socket.socket) -> None:
    """Send at once, and let a read of nothing end after `CHECK_S`: a socket's own limit costs a call per read."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    seconds, rest = divmod(CHECK_S, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(seconds), int(rest * 1e6)))
    network.close_in_children(connection)
