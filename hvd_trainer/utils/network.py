"""This machine's addresses and network interfaces."""

from __future__ import annotations

import ipaddress
import os
import socket
import weakref
from contextlib import suppress

import psutil

from hvd_trainer.errors import LaunchError

LOOPBACK = "127.0.0.1"
BACKLOG = 4096
"""Connections of ranks that may arrive at the same moment; Linux limits it by net.core.somaxconn."""
TEST_NET_ADDRESS = "203.0.113.1"
"""An address that no host has (RFC 5737, TEST-NET-3): the route to it is the one to most other hosts."""


def source_address(host: str, port: int) -> str:
    """Return this machine's own address on the route to `host`. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


def is_loopback(host: str) -> bool:
    """Return True for "localhost" and loopback addresses, such as 127.0.0.0/8."""
    with suppress(ValueError):  # a name
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def outward_address(host: str, port: int) -> str:
    """Return the address of this machine that ranks that connect to `host` can reach: that on the route to it.

    If that is a loopback address although `host` does not ask for one (Debian resolves a machine's own name to
    127.0.1.1): the address on the route to other hosts, else the first one that is no loopback address.
    """
    if is_loopback(host):
        return LOOPBACK
    for target in (host, TEST_NET_ADDRESS):
        with suppress(OSError):  # no such name, or no route
            if not is_loopback(address := source_address(target, port)):
                return address
    return next((one for _, one in sorted(_addresses()) if not is_loopback(one)), LOOPBACK)


def listen(address: str, port: int) -> socket.socket:
    """Return a socket that listens at an address of this machine, or at all of them if that is empty.

    Raises:
        OSError: the port is in use, or the address is not of this machine.
    """
    both = not address and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=BACKLOG, dualstack_ipv6=both)


def resolve_own_address(host: str) -> str | None:
    """Return the address of this machine by which all ranks connect that are given the name `host`.

    None if that is not certain: the name is not this machine's (it may be behind address translation), has several
    addresses, or resolves to a loopback address here (Debian) and to another one elsewhere.
    """
    addresses = _resolve(host)
    if not addresses:
        return None
    if is_loopback(host):
        return LOOPBACK if LOOPBACK in addresses else min(addresses)
    own = {entry.address for entries in psutil.net_if_addrs().values() for entry in entries}
    (first, *others) = sorted(addresses)
    return first if not others and first in own and not is_loopback(first) else None


def resolves_to_loopback(host: str) -> bool:
    """Return True if a name other than localhost has only loopback addresses: Debian's 127.0.1.1 for a machine."""
    addresses = _resolve(host)
    return bool(addresses) and not is_loopback(host) and all(map(is_loopback, addresses))


def _resolve(host: str) -> set[str]:
    """Return the addresses of a host; none if its name does not resolve."""
    try:
        return {str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return set()


def interface_address(interface: str) -> str:
    """Return the IPv4 address of a network interface.

    Raises:
        LaunchError: there is no such interface, or it has no address.
    """
    named = dict(reversed(_addresses()))
    if interface not in named:
        raise LaunchError(
            f"Network interface {interface} (--network-interface, HOROVOD_GLOO_IFACE): {socket.gethostname()} has "
            f"none of that name with an IPv4 address. "
            f"It has {', '.join(f'{name} ({address})' for name, address in sorted(named.items()))}."
        )
    return named[interface]


def _addresses() -> list[tuple[str, str]]:
    """Return all pairs of an interface and an IPv4 address of it."""
    return [
        (name, entry.address)
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == socket.AF_INET
    ]


def interface_name(address: str) -> str | None:
    """Return the name of the network interface with an address, such as `eth0`; None if no interface has it."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            return str(name)
    return None


_of_this_process: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def close_in_children(connection: socket.socket) -> None:
    """Close a connection in processes forked from now on: a copy there would hide the death of this process."""
    _of_this_process.add(connection)


def _close_all() -> None:
    for connection in list(_of_this_process):
        connection.close()


os.register_at_fork(after_in_child=_close_all)


def shut_down_connections(address: str) -> int:
    """Shut down all TCP connections of this process to an address, also those of libraries, and return how many.

    A host that is gone sends no FIN: a read from it would block until a time limit.
    """
    count = 0
    for connection in psutil.Process().net_connections("tcp"):
        if connection.raddr and connection.raddr.ip.removeprefix("::ffff:") == address:
            with suppress(OSError), socket.socket(fileno=os.dup(connection.fd)) as copy:
                copy.shutdown(socket.SHUT_RDWR)
                count += 1
    return count
