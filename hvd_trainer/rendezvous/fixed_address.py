"""Rendezvous at an address that all ranks are given: `env://`, `tcp://HOST:PORT` or `file:///PATH`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

import torch.distributed as dist

from hvd_trainer.errors import LaunchError, first_line
from hvd_trainer.launch.world import World
from hvd_trainer.rendezvous import store_client
from hvd_trainer.rendezvous.endpoint import Endpoint
from hvd_trainer.rendezvous.join import RendezvousSettings, join_by_registry, serve_store
from hvd_trainer.rendezvous.registry import FileRegistry, StoreRegistry, private_file
from hvd_trainer.rendezvous.shared_stores import JobStore, shared_stores
from hvd_trainer.utils.network import (
    LOOPBACK,
    TEST_NET_ADDRESS,
    outward_address,
    resolve_own_address,
    resolves_to_loopback,
)

PUBLIC_TOKEN = "0" * 32
"""Of a store whose address is all that ranks share: everyone may read it. It has other stores' endpoints only."""


def join_at_address(init_method: str, settings: RendezvousSettings) -> JobStore:
    """Join the ranks at an address that all of them are given.

    Raises:
        LaunchError: the address is missing, taken, or nobody answers there in time.
    """
    if init_method.startswith("file://"):
        return _join_by_file(init_method, settings)
    world = settings.world
    host, port = parse_address(init_method, settings.environ, world)
    if world.num_nodes == 1:
        file = private_file(f"by-hand-{port}-{settings.session}")
        return join_by_registry(FileRegistry(file), settings, LOOPBACK, port)
    return meet_at(host, port, settings, settings.session)


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


def parse_address(init_method: str, environ: Mapping[str, str], world: World) -> tuple[str, int]:
    """Return host and port of `env://` or `tcp://HOST:PORT`.

    Raises:
        LaunchError: one of them is missing or malformed.
    """
    if init_method == "env://":
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environ]
        if missing:
            raise LaunchError(
                f"The ranks were started by {world.launcher} and cannot find each other: "
                f"{' and '.join(missing)} not set. Type on every rank: export MASTER_ADDR=HOST_OF_RANK_0 "
                f"MASTER_PORT=29500, or pass --init-method tcp://HOST_OF_RANK_0:29500"
            )
        return environ["MASTER_ADDR"], parse_port(environ["MASTER_PORT"])
    if not init_method.startswith("tcp://"):
        raise LaunchError(f"--init-method {init_method} is none of env://, tcp://HOST:PORT and file:///PATH.")
    match = re.match(r"tcp://(.+):([0-9]+)($|[/?])", init_method)
    if not match:
        raise LaunchError(
            f"--init-method {init_method} names no port. Type: --init-method {init_method.rstrip('/:')}:29500"
        )
    return match[1].strip("[]"), parse_port(match[2])


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
    world = settings.world
    address = listen_address(host, world)
    if world.is_first:
        serve_store(world, address, port, PUBLIC_TOKEN)
    try:
        return store_client.connect(Endpoint(address, port, PUBLIC_TOKEN), settings.timeout)
    except (dist.DistError, RuntimeError) as error:
        raise LaunchError(
            f"{world} could not meet the others at {host}:{port}: {first_line(error)}. If no rank 0 listens "
            f"there, start all {world.size} ranks. If rank 0's machine has several networks, name it by its "
            f"address in the one that they share."
        ) from None


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


def _join_by_file(url: str, settings: RendezvousSettings) -> JobStore:
    """Join the ranks by a file that all nodes see, one for each session. Only its owner can read it."""
    path = Path(f"{urlsplit(url).path}.{settings.session}")
    address = settings.address or outward_address(TEST_NET_ADDRESS, 1)
    address = LOOPBACK if settings.world.num_nodes == 1 else address
    try:
        path.parent.stat()  # without the folder, all ranks but the first would wait for a file in it
        return join_by_registry(FileRegistry(path), settings, address)
    except OSError as error:
        raise LaunchError(
            f"{settings.world} could not meet the others at {url}: {first_line(error)}. Name a new file in a "
            f"folder that all ranks see."
        ) from error
