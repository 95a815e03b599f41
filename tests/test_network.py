"""Which of this machine's addresses the others are told."""

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
    """Of a machine whose own name leads to 127.0.1.1, and from which no route leads out."""
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
        # A name that leads to the machine itself only: others know it by another address.
        ("me", "10.1.0.7"),
        # Whoever meets there means this machine.
        ("localhost", "127.0.0.1"),
        ("127.0.0.1", "127.0.0.1"),
        ("127.0.1.1", "127.0.0.1"),
    ],
)
def test_what_others_are_told(host: str, address: str) -> None:
    assert network.outward_address(host, 1) == address


@pytest.mark.usefixtures("cards")
def test_an_interface_by_its_name() -> None:
    assert network.interface_address("eth0") == "10.1.0.7"
    assert network.interface_name("10.2.0.7") == "eth1"
    for name in ("ib0", "tun0"):
        with pytest.raises(LaunchError, match=rf"--network-interface {name}: .* eth0 \(10.1.0.7\), eth1"):
            network.interface_address(name)


def test_this_machines_own() -> None:
    assert network.interface_address("lo") == "127.0.0.1"
    assert network.outward_address("localhost", 1) == network.LOOPBACK


@pytest.mark.parametrize(
    ("family", "dialled"), [(socket.AF_INET, "127.0.0.2"), (socket.AF_INET6, "::ffff:127.0.0.2")]
)
def test_who_waits_for_a_host_that_is_gone_waits_no_longer(family: int, dialled: str) -> None:
    """And only who waits for that one. The connection is not ours to close: an engine holds it."""
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
