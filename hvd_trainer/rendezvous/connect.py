"""How the ranks of any launcher find each other, so that any launcher can start either engine.

Every launcher leads to the same thing, one `torch.distributed.Store` that all ranks share:

    launcher      how rank 0's ticket, an address and a token, reaches the others
    python        one process: the store lives in it
    run           the parent process holds the store and tells each child
    all others,   a file that only this user reads
    on one node
    torchrun      torchrun's own store, which outlives the ranks
    horovodrun    horovodrun's key-value server (HTTP); elastic, on one node too
    srun          a door on the step's first host, at a port made from the numbers of job and step
    mpirun        MPI itself (mpi4py)
    hand          a store at an agreed address: MASTER_ADDR and MASTER_PORT, or --init-method

What torchrun, horovodrun and a store at an agreed address are told, they tell all who come by. Where that is too
open, ranks have a file with a secret of theirs (HVD_TRAINER_SECRET_FILE): see `endpoint.py`. What the ranks
then say to each other is in `ranks.py`.
"""

from __future__ import annotations

import atexit
import itertools
import os
import re
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple, TypeVar
from urllib.parse import urlsplit

import torch.distributed as dist

from hvd_trainer.errors import LaunchError, first_line
from hvd_trainer.launch.slurm import SlurmStep, read_step, slurm_job
from hvd_trainer.launch.world import World, is_elastic
from hvd_trainer.rendezvous import store_client
from hvd_trainer.rendezvous.endpoint import (
    Endpoint,
    create_token,
    parse_endpoint,
    read_secret,
    sign_endpoint,
    verify_endpoint,
)
from hvd_trainer.rendezvous.registry import (
    EndpointRegistry,
    FileRegistry,
    HttpRegistry,
    StoreRegistry,
    job_file,
    private_file,
)
from hvd_trainer.rendezvous.slurm_discovery import StepDiscovery
from hvd_trainer.utils.network import (
    LOOPBACK,
    TEST_NET_ADDRESS,
    outward_address,
    resolve_own_address,
    resolves_to_loopback,
)

POLL_S, LONGEST_POLL_S = 0.02, 1.0
MAX_ENDPOINT_BYTES = 512
FREED_S = 2.0
"""Until a port that was chosen is free: the server of a job that ran there just before ends a moment after it."""
OPEN = "0" * 32
"""The token of the store at an address that is all that ranks by hand share."""
_SESSIONS = itertools.count()
_MEETINGS: dict[str, Rendezvous] = {}
"""Stores at a fixed place serve all of a process's trainings: of two that follow each other at one port or file, a
fast rank would find the first, which slower ranks are about to close."""
T = TypeVar("T")
RUN_STORE = "HVD_TRAINER_STORE"
"""Where `hvd_trainer.run` tells its children the ticket to the store."""


class Rendezvous(NamedTuple):
    """What all ranks share once they have found each other."""

    store: dist.Store
    host: str
    """Where rank 0 is, as an address that the other ranks reach."""


@atexit.register
def _close_stores() -> None:
    """Closes the stores of this process, and removes a file that all ranks have done with.

    PyTorch's own removal misses it where two ranks leave at once, and the next job would find it.
    """
    done = [
        urlsplit(where).path
        for where, (store, _) in _MEETINGS.items()
        if where.startswith("file://") and store.add("left", 1) == store.add("met", 0)
    ]
    _MEETINGS.clear()
    for path in done:
        Path(path).unlink(missing_ok=True)


def reset_sessions() -> None:
    """The next session is the first: horovodrun has cleared its board, and processes come to which it is."""
    global _SESSIONS
    _SESSIONS = itertools.count()


def open_store(
    world: World,
    environ: Mapping[str, str],
    *,
    init_method: str | None = None,
    address: str | None = None,
    timeout_s: float = 300.0,
) -> Rendezvous:
    """Opens the store that all ranks of this job share.

    A process may do so several times (one training after another): each time is a session of its own, and what
    an earlier one left in a store that lives on is not seen.

    Args:
        world: this process's place, from `launch.detect`.
        environ: the environment.
        init_method: where ranks that were started by hand meet: `env://`, `tcp://HOST:PORT` or
            `file:///PATH`, as in `torch.distributed`.
        address: of this machine, where the ranks shall meet if rank 0 is here; None: on the route to the others.
        timeout_s: how long to wait for the other ranks, in seconds.

    Raises:
        LaunchError: the address is missing, taken, or nobody answers there in time.
    """
    session = f"hvd_trainer.{next(_SESSIONS)}"
    if world.size == 1:
        return Rendezvous(dist.HashStore(), LOOPBACK)
    meeting = _find_store(world, environ, session, init_method, address, timedelta(seconds=timeout_s))
    return Rendezvous(dist.PrefixStore(session, meeting.store), meeting.host)


def _find_store(
    world: World,
    environ: Mapping[str, str],
    session: str,
    init_method: str | None,
    address: str | None,
    timeout: timedelta,
) -> Rendezvous:
    secret = read_secret(environ)
    by_hand = init_method is not None or world.launcher == "hand"
    if by_hand or (
        world.launcher in ("mpirun", "mpiexec", "srun") and {"MASTER_ADDR", "MASTER_PORT"} <= {*environ}
    ):
        method = init_method or "env://"
        if method.startswith("file://"):
            return _meet_in_file(world, method, timeout)
        host, port = _place(world, environ, method)
        if world.num_nodes == 1:
            here = FileRegistry(private_file(f"by-hand-{port}-{session}"))
            return _meet_at(here, world, secret, LOOPBACK, timeout, port)
        there = _meet_by_hand(world, host, port, timeout)
        return _meet_at(StoreRegistry(there, host, port, session), world, secret, address, timeout)
    if world.launcher == "run":
        return _join(parse_endpoint(_needed(environ, RUN_STORE, world)), world, timeout)
    board = _board(world, environ, session, timeout)
    if board is not None:
        return _meet_at(board, world, secret, LOOPBACK if world.num_nodes == 1 else address, timeout)
    if world.launcher == "srun":
        return _meet_at_door(world, read_step(environ), slurm_job(environ).restart_count, secret, timeout)
    return _mpi_store(world, address, timeout)


def _board(world: World, environ: Mapping[str, str], session: str, timeout: timedelta) -> EndpointRegistry | None:
    """Where rank 0 pins its ticket, if the launcher leaves a place for it."""
    here = FileRegistry(job_file(world, environ, session)) if world.num_nodes == 1 else None
    if world.launcher == "horovodrun":
        server = _needed(environ, "HOROVOD_GLOO_RENDEZVOUS_ADDR", world)
        port = _needed(environ, "HOROVOD_GLOO_RENDEZVOUS_PORT", world)
        board = HttpRegistry(server, _port(port), session)
        if here is None or is_elastic(environ):
            return board
        board.read()  # for an error if horovodrun has ended
    if world.launcher == "torchrun" and here is None:
        place = f"{_needed(environ, 'MASTER_ADDR', world)}:{_port(_needed(environ, 'MASTER_PORT', world))}"
        if place not in _MEETINGS:
            _MEETINGS[place] = Rendezvous(
                _open_torch_store(world, "env://", place, timeout), environ["MASTER_ADDR"]
            )
        shared, host = _MEETINGS[place]
        return StoreRegistry(shared, host, _port(environ["MASTER_PORT"]), session)
    return here


def _needed(environ: Mapping[str, str], name: str, world: World) -> str:
    if not environ.get(name):
        raise LaunchError(
            f"{world.launcher} should set {name} and has not, so the ranks cannot find each other. Were its "
            f"other variables set by hand? Set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and "
            f"MASTER_PORT instead."
        )
    return environ[name]


def _port(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 0 < int(text[:6]) < 65536):
        raise LaunchError(f"A port is a number from 1 to 65535, not {text[:60]!r}.")
    return int(text)


def _join(ticket: Endpoint, world: World, timeout: timedelta) -> Rendezvous:
    try:
        return Rendezvous(store_client.connect(ticket, timeout), ticket.host)
    except (dist.DistError, RuntimeError) as error:
        raise LaunchError(
            f"{world} could not reach rank 0 at {ticket.place}: {first_line(error)}. See what rank 0 printed: it "
            f"may have ended; else a firewall may stand between the nodes."
        ) from None


def _place(world: World, environ: Mapping[str, str], init_method: str) -> tuple[str, int]:
    """The host and port where ranks that were started by hand meet."""
    if init_method == "env://":
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environ]
        if missing:
            raise LaunchError(
                f"The ranks were started by {world.launcher} and cannot find each other: "
                f"{' and '.join(missing)} not set. Type on every rank: export MASTER_ADDR=HOST_OF_RANK_0 "
                f"MASTER_PORT=29500, or pass --init-method tcp://HOST_OF_RANK_0:29500"
            )
        return environ["MASTER_ADDR"], _port(environ["MASTER_PORT"])
    if not init_method.startswith("tcp://"):
        raise LaunchError(f"--init-method {init_method} is none of env://, tcp://HOST:PORT and file:///PATH.")
    match = re.match(r"tcp://(.+):([0-9]+)($|[/?])", init_method)
    if not match:
        raise LaunchError(
            f"--init-method {init_method} names no port. Type: --init-method {init_method.rstrip('/:')}:29500"
        )
    return match[1].strip("[]"), _port(match[2])


def _meet_by_hand(world: World, host: str, port: int, timeout: timedelta) -> dist.Store:
    """A store at a place that all know beforehand, open to all who come there: for one ticket of each training."""
    where = f"{host}:{port}"
    if where not in _MEETINGS:
        here = _heard_at(world, host)
        if world.is_first:
            _serve(world, here, port, OPEN)
        try:
            store = store_client.connect(Endpoint(here, port, OPEN), timeout)
        except (dist.DistError, RuntimeError) as error:
            raise LaunchError(
                f"{world} could not meet the others at {where}: {first_line(error)}. If no rank 0 listens there, "
                f"start all {world.size} ranks. If rank 0's machine has several networks, name it by its "
                f"address in the one that they share."
            ) from None
        _MEETINGS[where] = Rendezvous(store, host)
    return _MEETINGS[where].store


def _heard_at(world: World, host: str) -> str:
    """The one address at which rank 0 listens, as far as this rank can tell it.

    Where its machine cannot tell by which address the others come, since the name has several, leads only there,
    or is translated on the way, it is that of the interface that leads outward: a name is seldom that of another
    network, over which ranks may exchange (--network-interface).
    """
    found = resolve_own_address(host)
    if found is None and (world.is_first or resolves_to_loopback(host)):
        found = outward_address(host, 1)
    return found or host


def _serve(world: World, address: str, port: int, token: str | None = None) -> Endpoint:
    """Rank 0 starts the server, at a port of the user's choice if it is not 0."""
    end = time.monotonic() + FREED_S
    while True:
        try:
            return store_client.serve(address, port, token=token)
        except OSError as error:
            if time.monotonic() > end:
                raise LaunchError(
                    f"{world} cannot listen at {address or 'any address'}:{port}: {error.strerror}. If "
                    f"the port is in use, choose another (torchrun: --master-port N, else MASTER_PORT or "
                    f"--init-method)."
                ) from error
            time.sleep(POLL_S)


def _meet_in_file(world: World, init_method: str, timeout: timedelta) -> Rendezvous:
    """In a file that all nodes see; its owner alone reads what the ranks say there."""
    if init_method not in _MEETINGS:
        path = urlsplit(init_method).path
        with suppress(OSError):  # there already, or PyTorch will say it
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
        _MEETINGS[init_method] = Rendezvous(_open_torch_store(world, init_method, init_method, timeout), LOOPBACK)
    _MEETINGS[init_method].store.set_timeout(timeout)  # a store on a file was not told
    return _MEETINGS[init_method]


def _open_torch_store(world: World, init_method: str, where: str, timeout: timedelta) -> dist.Store:
    # env:// would take rank and size from RANK and WORLD_SIZE, which mpirun and srun do not set.
    url = f"{init_method}{'&' if '?' in init_method else '?'}rank={world.rank}&world_size={world.size}"
    try:
        store: dist.Store = next(dist.rendezvous(url, timeout=timeout))[0]
    except (dist.DistError, RuntimeError, ValueError, OSError) as error:
        raise LaunchError(
            f"{world} could not meet the others at {where}: {first_line(error)}. If the port is in use, "
            f"choose another (torchrun: --master-port N, else MASTER_PORT or --init-method); if no rank 0 "
            f"listens there, start all {world.size} ranks."
        ) from error
    # A job that was killed leaves its file, and what that says is not true of this job.
    if where.startswith("file://") and store.add("met", 1) > world.size:
        raise LaunchError(
            f"The file of --init-method {where} is left from an earlier job. Type: rm {urlsplit(where).path}, or "
            f"name a new file."
        )
    return store


def _meet_at(
    board: EndpointRegistry,
    world: World,
    secret: str | None,
    address: str | None,
    timeout: timedelta,
    port: int = 0,
) -> Rendezvous:
    """Rank 0 serves a store and pins the ticket to a board; the others read it there."""
    if world.is_first:
        token, nonce = create_token(secret)
        ticket = _serve(world, address or board.own_address(), port, token)
        board.post(sign_endpoint(ticket, nonce, secret))
    else:
        ticket = _wait_for(lambda: _on(board, secret), world, timeout)
    return _join(ticket, world, timeout)


def _on(board: EndpointRegistry, secret: str | None) -> Endpoint | None:
    text = board.read()
    return None if text is None else verify_endpoint(text, secret)


def _wait_for(read: Callable[[], T | None], world: World, timeout: timedelta) -> T:
    began, limit_s = time.monotonic(), timeout.total_seconds()
    while (found := read()) is None:
        waited_s = time.monotonic() - began
        if waited_s > limit_s:
            raise LaunchError(
                f"{world} waited {limit_s:.0f} s for rank 0, which never said where it is. "
                f"See what rank 0 printed: it may have ended; or it has another TMPDIR on this node, or another "
                f"HVD_TRAINER_SECRET_FILE."
            )
        # A thousand ranks that ask fifty times a second would keep rank 0's machine from starting it.
        time.sleep(min(LONGEST_POLL_S, max(POLL_S, waited_s / 10)))
    return found


def _meet_at_door(
    world: World, step: SlurmStep, restarts: int, secret: str | None, timeout: timedelta
) -> Rendezvous:
    """Rank 0 serves a store, and tells its ticket to those of its step who ask at the door."""
    name = f"{step.job}.{step.number} start {restarts}"
    if name not in _MEETINGS:
        if world.is_first:
            host = _slurm_address(step.host)
            here = _heard_at(world, host)
            token, nonce = create_token(secret)
            ticket = _serve(world, here, 0, token)
            StepDiscovery(name, step.ports).open(
                here, sign_endpoint(replace(ticket, host=step.host), nonce, secret)
            )
            _MEETINGS[name] = Rendezvous(_join(replace(ticket, host=here), world, timeout).store, host)
        else:
            nodes = step.hosts if step.scattered else step.hosts[:1]
            places = {node: _heard_at(world, _slurm_address(node)) for node in nodes}
            door = StepDiscovery(name, step.ports, places)
            _MEETINGS[name] = _join(_wait_for(lambda: _at(door, secret), world, timeout), world, timeout)
    return _MEETINGS[name]


def _at(door: StepDiscovery, secret: str | None) -> Endpoint | None:
    """The ticket told at the door of the node that it is for: on another one somebody has only repeated it."""
    for node, address, word in door.answers():
        ticket = verify_endpoint(word, secret)
        if ticket is not None and ticket.host == node:
            return replace(ticket, host=address)
    return None


def _slurm_address(node: str) -> str:
    """A node's address: its name, unless that is Slurm's alone, which then knows the address too."""
    with suppress(OSError):
        socket.getaddrinfo(node, None)
        return node
    with suppress(OSError, subprocess.SubprocessError):
        command = ["scontrol", "--oneliner", "show", "node", node]
        shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
        fields = dict(field.partition("=")[::2] for field in shown.split())
        socket.getaddrinfo(fields.get("NodeAddr", ""), None)
        return fields["NodeAddr"]
    raise LaunchError(
        f"The address of {node}, where rank 0 runs, is known neither to this machine nor to Slurm. Type before "
        f"srun: export MASTER_ADDR=ADDRESS_OF_RANK_0 MASTER_PORT=29500"
    )


def _mpi_store(world: World, address: str | None, timeout: timedelta) -> Rendezvous:
    try:
        from mpi4py import MPI
    except ImportError:
        raise LaunchError(
            f"{world.launcher} started ranks on several nodes and does not tell them where rank 0 is. Type: pip "
            f"install mpi4py, or pass the address: mpirun -x MASTER_ADDR=HOST_OF_RANK_0 -x MASTER_PORT=29500"
        ) from None
    served = _serve(world, address or outward_address(TEST_NET_ADDRESS, 1), 0) if world.is_first else None
    said = bytearray(str(served or "").encode().ljust(MAX_ENDPOINT_BYTES))
    MPI.COMM_WORLD.Bcast(said, root=0)  # of bytes: its `bcast` is of pickles
    return _join(parse_endpoint(said.decode().rstrip()), world, timeout)
