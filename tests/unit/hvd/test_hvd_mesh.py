"""The connections by which ranks agree on operations of `hvd`, between threads of one process."""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from hvd_trainer.errors import LaunchError
from hvd_trainer.hvd.common.mesh import Mesh
from hvd_trainer.rendezvous.endpoint import parse_endpoint
from hvd_trainer.utils.network import LOOPBACK


def in_members(size: int, function: Callable[[Mesh, int], object]) -> list[object]:
    """Return what a function returns to each member of a new mesh."""
    store = dist.HashStore()

    def run(member: int) -> object:
        mesh = Mesh(store, member, size, address=LOOPBACK, on_wait=lambda: None)
        try:
            return function(mesh, member)
        finally:
            mesh.close()

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


@pytest.mark.parametrize("size", [1, 2, 5])
def test_all_members_get_all_messages(size: int) -> None:
    """Also empty ones, and ones that are larger than a connection's buffers, in both directions at once."""
    lengths = (0, 20_000_000, 7)
    rounds = [[bytes([member]) * lengths[(member + turn) % 3] for member in range(size)] for turn in range(3)]
    received = in_members(size, lambda mesh, member: [mesh.all_gather(messages[member]) for messages in rounds])
    assert received == [rounds] * size


def test_client_without_the_token_is_turned_away() -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(Mesh, store, 0, 2, address=LOOPBACK, on_wait=lambda: None)
        endpoint = parse_endpoint(store.get("mesh 0").decode())
        with socket.create_connection((endpoint.host, endpoint.port)) as client:
            client.sendall(b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n")
            second = pool.submit(Mesh, store, 1, 2, address=LOOPBACK, on_wait=lambda: None)
            meshes = first.result(), second.result()
            answers = pool.map(lambda mesh, text: mesh.all_gather(text), meshes, [b"one", b"two"])
            assert list(answers) == [[b"one", b"two"]] * 2
            client.settimeout(5)
            with pytest.raises(ConnectionResetError):
                client.recv(1)
        for mesh in meshes:
            mesh.close()


def test_address_that_cannot_be_reached_is_named() -> None:
    store = dist.HashStore()
    with socket.create_server((LOOPBACK, 0)) as closed:
        port = closed.getsockname()[1]
    store.set("mesh 0", f"{LOOPBACK}:{port}/{'00' * 16}")
    with pytest.raises(LaunchError, match=rf"at 127.0.0.1:{port} .*HOROVOD_GLOO_IFACE=eth0"):
        Mesh(store, 1, 2, address=LOOPBACK, on_wait=lambda: None)


def test_member_that_waits_hears_of_an_end() -> None:
    def run(mesh: Mesh, member: int) -> str:
        if member == 0:
            mesh.abort()
            return ""
        with pytest.raises(ConnectionError) as caught:
            mesh.all_gather(b"anything")
        return str(caught.value)

    assert in_members(3, run)[1:] == ["another rank has closed its connection: it has ended, or was killed."] * 2
