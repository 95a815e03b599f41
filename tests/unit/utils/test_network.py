"""Addresses and interfaces of this machine, and its connections to a host that is gone."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import psutil
import pytest

from hvd_trainer.errors import LaunchError
from hvd_trainer.utils import network

CARDS = {"lo": ["127.0.0.1"], "eth1": ["10.2.0.7"], "eth0": ["10.1.0.7", "10.1.0.8"], "tun0": []}


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose own name resolves to 127.0.1.1 and that has no route to other networks."""
    entries = {
        name: [SimpleNamespace(family=socket.AF_INET, address=address) for address in addresses]
        for name, addresses in CARDS.items()
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: entries)

    def source_address(host: str, port: int) -> str:
        if host == network.TEST_NET_ADDRESS:
            raise OSError("Network is unreachable")
        return {"me": "127.0.0.1", "other": "10.2.0.7"}[host]

    monkeypatch.setattr(network, "source_address", source_address)


@pytest.mark.usefixtures("cards")
@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("other", "10.2.0.7"),
        # A name that resolves to loopback here: other hosts use another address.
        ("me", "10.1.0.7"),
        # Loopback was asked for.
        ("localhost", "127.0.0.1"),
        ("127.0.0.1", "127.0.0.1"),
        ("127.0.1.1", "127.0.0.1"),
    ],
)
def test_outward_address(host: str, address: str) -> None:
    assert network.outward_address(host, 1) == address


@pytest.mark.usefixtures("cards")
def test_interface_address_and_name() -> None:
    assert network.interface_address("eth0") == "10.1.0.7"
    assert network.interface_name("10.2.0.7") == "eth1"
    for name in ("ib0", "tun0"):
        with pytest.raises(LaunchError, match=rf"Network interface {name} .* eth0 \(10.1.0.7\), eth1"):
            network.interface_address(name)


def test_loopback_of_this_machine() -> None:
    assert network.interface_address("lo") == "127.0.0.1"
    assert network.outward_address("localhost", 1) == network.LOOPBACK


@pytest.mark.parametrize(
    ("family", "dialled"), [(socket.AF_INET, "127.0.0.2"), (socket.AF_INET6, "::ffff:127.0.0.2")]
)
def test_shut_down_connections_to_one_address_only(family: int, dialled: str) -> None:
    """A blocked read ends, although an engine owns the socket; connections to other addresses stay."""
    with (
        socket.create_server(("127.0.0.2", 0)) as gone,
        socket.create_server(("127.0.0.3", 0)) as there,
        socket.socket(family) as to_gone,
        socket.create_connection(there.getsockname(), timeout=5) as to_there,
        there.accept()[0] as answer,
    ):
        to_gone.connect((dialled, gone.getsockname()[1]))
        to_gone.settimeout(5)
        assert network.shut_down_connections("127.0.0.2") == 1
        assert to_gone.recv(1) == b""
        answer.sendall(b"!")
        assert to_there.recv(1) == b"!"
