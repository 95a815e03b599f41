"""Rendezvous at an address that all ranks know: MASTER_ADDR and MASTER_PORT, or one that they compute."""

from __future__ import annotations

import torch.distributed as dist

from hvd_trainer.errors import LaunchError
from hvd_trainer.launch.world import World
from hvd_trainer.rendezvous.endpoint import Endpoint
from hvd_trainer.rendezvous.join import (
    RendezvousSettings,
    join_by_registry,
    join_store,
    serve_store,
    wait_for_server,
)
from hvd_trainer.rendezvous.registry import StoreRegistry
from hvd_trainer.rendezvous.shared_stores import JobStore, shared_stores
from hvd_trainer.utils.network import outward_address, resolve_own_address, resolves_to_loopback

PUBLIC_TOKEN = "0" * 32
"""Of a store whose address is all that ranks share: everyone may read it. It has other stores' endpoints only."""
ADDRESS = ("MASTER_ADDR", "MASTER_PORT")


def join_at_address(settings: RendezvousSettings) -> JobStore:
    """Join the ranks at the address that all of them are given.

    Raises:
        LaunchError: the address is missing, taken, or nobody answers there in time.
    """
    environ = settings.environ
    if missing := [name for name in ADDRESS if name not in environ]:
        raise LaunchError(
            f"The ranks were started by {settings.world.launcher} and cannot find each other: "
            f"{' and '.join(missing)} not set. Type on every rank: export MASTER_ADDR=HOST_OF_RANK_0 "
            f"MASTER_PORT=29500"
        )
    return meet_at(environ["MASTER_ADDR"], parse_port(environ["MASTER_PORT"]), settings, settings.session)


def meet_at(host: str, port: int, settings: RendezvousSettings, name: str) -> JobStore:
    """Join the ranks at rank 0's host and a port, where it serves a store for all of its sessions.

    Args:
        name: of the session in that store.

    Raises:
        LaunchError: the port is in use, or nobody answers there in time.
    """
    public = shared_stores.get(f"{host}:{port}", lambda: _open_public_store(host, port, settings))
    address = settings.address or outward_address(host, port)
    return join_by_registry(StoreRegistry(public, name), settings, address)


def parse_port(text: str) -> int:
    """Return the number of a TCP port.

    Raises:
        LaunchError: the text is none.
    """
    if not (text.isascii() and text.isdecimal() and 0 < int(text[:6]) < 65536):
        raise LaunchError(f"A port is a number from 1 to 65535, not {text[:60]!r}.")
    return int(text)


def _open_public_store(host: str, port: int, settings: RendezvousSettings) -> dist.Store:
    """Serve or join the store at the given address, which only has the endpoint of each session's own store."""
    address = listen_address(host, settings.world)
    endpoint = Endpoint(address, port, PUBLIC_TOKEN)
    if settings.world.is_first:
        serve_store(settings.world, address, port, PUBLIC_TOKEN)
    return join_store(wait_for_server(lambda: endpoint, settings), settings).store


def listen_address(host: str, world: World) -> str:
    """Return the address at which rank 0 listens if the ranks are given the name `host`, as far as it is known
    here.

    If the name does not determine it on rank 0's machine (several addresses, loopback only, address translation),
    rank 0 listens at the interface of the default route: the name is seldom one in another network, such as that
    of --network-interface.
    """
    address = resolve_own_address(host)
    if address is None and (world.is_first or resolves_to_loopback(host)):
        address = outward_address(host, 1)
    return address or host
