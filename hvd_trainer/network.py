"""This machine's addresses and network interfaces."""

from __future__ import annotations

import socket

import psutil

LOOPBACK = "127.0.0.1"


def address_towards(host: str, port: int) -> str:
    """This machine's own address on the route to `host` (nothing is sent)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """The name of the network interface that has this address, as the engines want it (`lo`, `eth0`)."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            return str(name)
    return None
