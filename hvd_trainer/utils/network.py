"""This machine's addresses and network interfaces."""

from __future__ import annotations

import ipaddress
import os
import socket
from contextlib import suppress

import psutil

from hvd_trainer.errors import LaunchError

LOOPBACK = "127.0.0.1"
QUEUE = 4096
"""Ranks that may come at the same moment; Linux takes as many as it is set to."""
ELSEWHERE = "203.0.113.1"
"""An address that no host has (RFC 5737): the way there is the one to most other hosts."""


def address_towards(host: str, port: int) -> str:
    """This machine's own address on the route to `host` (nothing is sent)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


def is_loopback(host: str) -> bool:
    """Whether that is meant to be this machine only: "localhost", or an address, of which 127.0.0.0/8 are such."""
    with suppress(ValueError):  # a name
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def outward_address(host: str, port: int) -> str:
    """This machine's address for the others, which have come to meet at `host`: that on the route there.

    Where `host` is this machine, under a name that is not meant to be this machine's only but leads there (Debian
    gives a machine's own name 127.0.1.1): that on the route to elsewhere, else the first that others could reach.
    """
    if is_loopback(host):
        return LOOPBACK
    for there in (host, ELSEWHERE):
        with suppress(OSError):  # no such name, or no route
            if not is_loopback(address := address_towards(there, port)):
                return address
    return next((one for _, one in sorted(_addresses()) if not is_loopback(one)), LOOPBACK)


def listen(address: str, port: int) -> socket.socket:
    """A listener at an address of this machine, or at all of them if that is empty.

    Raises:
        OSError: the port is in use, or the address is not of this machine.
    """
    both = not address and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=QUEUE, dualstack_ipv6=both)


def address_at(host: str) -> str | None:
    """The one address of this machine by which all others come who have been told to come to `host`.

    None where that cannot be said: the name is not this machine's (there may be a translation of addresses before
    it), has several addresses, or leads to nothing but this machine here (Debian's own name) and elsewhere here.
    """
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return None
    if is_loopback(host):
        return LOOPBACK if LOOPBACK in found else min(found)
    own = {entry.address for entries in psutil.net_if_addrs().values() for entry in entries}
    (first, *others) = sorted(found)
    return first if not others and first in own and not is_loopback(first) else None


def leads_only_here(host: str) -> bool:
    """Whether a name is this machine's, and leads to nothing that others could reach (Debian's 127.0.1.1)."""
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return False
    return not is_loopback(host) and all(map(is_loopback, found))


def address_of(interface: str) -> str:
    """The IPv4 address of a network interface.

    Raises:
        LaunchError: there is no such interface, or it has no address.
    """
    named = dict(reversed(_addresses()))
    if interface not in named:
        raise LaunchError(
            f"--network-interface {interface}: {socket.gethostname()} has none of that name with an IPv4 address. "
            f"It has {', '.join(f'{name} ({address})' for name, address in sorted(named.items()))}."
        )
    return named[interface]


def _addresses() -> list[tuple[str, str]]:
    """Interfaces and their IPv4 addresses; one may have several."""
    return [
        (name, entry.address)
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == socket.AF_INET
    ]


def interface_of(address: str) -> str | None:
    """The name of the network interface that has this address, as the engines want it (`lo`, `eth0`)."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            return str(name)
    return None


def hang_up_on(address: str) -> int:
    """Ends this process's TCP connections with an address, whoever holds them, and returns how many.

    A machine that is gone says no goodbye, and who waits for it over a connection waits until a time limit.
    """
    ended = 0
    for connection in psutil.Process().net_connections("tcp"):
        if connection.raddr and connection.raddr.ip.removeprefix("::ffff:") == address:
            with suppress(OSError), socket.socket(fileno=os.dup(connection.fd)) as line:
                line.shutdown(socket.SHUT_RDWR)
                ended += 1
    return ended
