"""How the ranks of any launcher find each other, so that any launcher can start either engine.

Every launcher leads to the same thing, one `torch.distributed.Store` that all ranks share:

    launcher      how rank 0's address reaches the others
    python        one process: the store lives in it
    torchrun      MASTER_ADDR and MASTER_PORT: torchrun's own store, which outlives the ranks
    hand          MASTER_ADDR and MASTER_PORT, or --init-method
    run           the parent process holds the store and tells each child
    horovodrun    horovodrun's key-value server (HTTP)
    mpirun, srun  one node: a private file, several: MASTER_ADDR and MASTER_PORT, or MPI itself (mpi4py),
                  or a door on the step's first host, at a port made from the numbers of job and step

What the ranks then say to each other is in `peers.py`.
"""

from __future__ import annotations

import atexit
import itertools
import re
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import torch.distributed as dist

from hvd_trainer.boards import Board, FileBoard, HttpBoard, StoreBoard, job_file
from hvd_trainer.door import Door
from hvd_trainer.errors import LaunchError, first_line
from hvd_trainer.launch import World, slurm_job
from hvd_trainer.network import ELSEWHERE, LOOPBACK, outward_address
from hvd_trainer.slurm import SlurmStep, read_step

POLL_S, LONGEST_POLL_S = 0.02, 1.0
_SESSIONS = itertools.count()
_MEETINGS: dict[str, Meeting] = {}
"""Stores at a fixed place serve all of a process's trainings: of two that follow each other at one port or file, a
fast rank would find the first, which slower ranks are about to close."""
RUN_STORE = "HVD_TRAINER_STORE"
"""Where `hvd_trainer.run` tells its children the address of the store."""


class Meeting(NamedTuple):
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


def begin_anew() -> None:
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
) -> Meeting:
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
        return Meeting(dist.HashStore(), LOOPBACK)
    meeting = _find_store(world, environ, session, init_method, address, timedelta(seconds=timeout_s))
    return Meeting(dist.PrefixStore(session, meeting.store), meeting.host)


def _find_store(
    world: World,
    environ: Mapping[str, str],
    session: str,
    init_method: str | None,
    address: str | None,
    timeout: timedelta,
) -> Meeting:
    if init_method is not None or world.launcher == "hand":
        return _torch_store(world, environ, init_method or "env://", timeout)
    if world.launcher == "torchrun":
        shared, host = _torch_store(world, environ, "env://", timeout)
        return _meet_at(StoreBoard(shared, host, _port(environ["MASTER_PORT"]), session), world, address, timeout)
    if world.launcher == "run":
        return _join_store(_needed(environ, RUN_STORE, world), world, timeout)
    if world.launcher == "horovodrun":
        server = _needed(environ, "HOROVOD_GLOO_RENDEZVOUS_ADDR", world)
        port = _needed(environ, "HOROVOD_GLOO_RENDEZVOUS_PORT", world)
        return _meet_at(HttpBoard(server, _port(port), session), world, address, timeout)
    if "MASTER_ADDR" in environ and "MASTER_PORT" in environ:
        return _torch_store(world, environ, "env://", timeout)
    if world.num_nodes == 1:
        return _meet_at(FileBoard(job_file(world, environ, session)), world, None, timeout)
    if world.launcher == "srun":
        return _meet_at_door(world, read_step(environ), slurm_job(environ).restarts, timeout)
    return _mpi_store(world, address, timeout)


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


def serve_store(address: str = LOOPBACK, timeout: timedelta = timedelta(seconds=300)) -> dist.TCPStore:
    """Starts a store's server in this process, bound to `address` only, on a port that the system picks."""
    listener = socket.create_server((address, 0))
    port = listener.getsockname()[1]
    return dist.TCPStore(
        address,
        port,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _join_store(address: str, world: World, timeout: timedelta) -> Meeting:
    host, _, port = address.rpartition(":")
    try:
        return Meeting(dist.TCPStore(host, _port(port), is_master=False, timeout=timeout), host)
    except (dist.DistError, RuntimeError) as error:
        raise LaunchError(
            f"{world} could not reach rank 0 at {address}: {first_line(error)}. See what rank 0 printed: it may "
            f"have ended; else a firewall may stand between the nodes."
        ) from error


def _torch_store(world: World, environ: Mapping[str, str], init_method: str, timeout: timedelta) -> Meeting:
    if init_method == "env://":
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environ]
        if missing:
            raise LaunchError(
                f"The ranks were started by {world.launcher} and cannot find each other: "
                f"{' and '.join(missing)} not set. Type on every rank: export MASTER_ADDR=HOST_OF_RANK_0 "
                f"MASTER_PORT=29500, or pass --init-method tcp://HOST_OF_RANK_0:29500"
            )
        where = f"{environ['MASTER_ADDR']}:{_port(environ['MASTER_PORT'])}"
    elif init_method.startswith("tcp://"):
        where = init_method
        if not re.match(r"tcp://.+:[0-9]+($|[/?])", where):
            raise LaunchError(
                f"--init-method {where} names no port. Type: --init-method {where.rstrip('/:')}:29500"
            )
    elif init_method.startswith("file://"):
        where = init_method
    else:
        raise LaunchError(f"--init-method {init_method} is none of env://, tcp://HOST:PORT and file:///PATH.")
    if where not in _MEETINGS:
        host = LOOPBACK if where.startswith("file://") else urlsplit(f"//{where.removeprefix('tcp://')}").hostname
        _MEETINGS[where] = Meeting(_open_torch_store(world, init_method, where, timeout), host or LOOPBACK)
    _MEETINGS[where].store.set_timeout(timeout)  # a store on a file was not told
    return _MEETINGS[where]


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


def _meet_at(board: Board, world: World, address: str | None, timeout: timedelta) -> Meeting:
    """Rank 0 serves a store and pins its address to a board; the others read it there."""
    if world.is_first:
        host = LOOPBACK if world.num_nodes == 1 else address or board.own_address()
        store = serve_store(host, timeout)
        board.post(f"{host}:{store.port}")
        return Meeting(store, host)
    return _join_store(_wait_for(board.read, world, timeout), world, timeout)


def _wait_for(read: Callable[[], str | None], world: World, timeout: timedelta) -> str:
    began, limit_s = time.monotonic(), timeout.total_seconds()
    while (address := read()) is None:
        waited_s = time.monotonic() - began
        if waited_s > limit_s:
            raise LaunchError(
                f"{world} waited {limit_s:.0f} s for rank 0, which never said where it is. "
                f"See what rank 0 printed: it may have ended."
            )
        # A thousand ranks that ask fifty times a second would keep rank 0's machine from starting it.
        time.sleep(min(LONGEST_POLL_S, max(POLL_S, waited_s / 10)))
    return address


def _meet_at_door(world: World, step: SlurmStep, restarts: int, timeout: timedelta) -> Meeting:
    """Rank 0 serves a store, and tells its port to those of its step who ask at the door."""
    name = f"{step.job}.{step.number} start {restarts}"
    if name not in _MEETINGS:
        if world.is_first:
            host = _slurm_address(step.host)
            store = dist.TCPStore(LOOPBACK, 0, is_master=True, timeout=timeout, wait_for_workers=False)
            Door(name, step.ports).open(store.port)
            _MEETINGS[name] = Meeting(store, host)
        else:
            hosts = [_slurm_address(host) for host in (step.hosts if step.scattered else step.hosts[:1])]
            door = Door(name, step.ports, hosts)
            _MEETINGS[name] = _join_store(_wait_for(door.read, world, timeout), world, timeout)
    return _MEETINGS[name]


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


def _mpi_store(world: World, address: str | None, timeout: timedelta) -> Meeting:
    try:
        from mpi4py import MPI
    except ImportError:
        raise LaunchError(
            f"{world.launcher} started ranks on several nodes and does not tell them where rank 0 is. Type: pip "
            f"install mpi4py, or pass the address: mpirun -x MASTER_ADDR=HOST_OF_RANK_0 -x MASTER_PORT=29500"
        ) from None
    served = serve_store(address or outward_address(ELSEWHERE, 1), timeout) if world.is_first else None
    where = MPI.COMM_WORLD.bcast(f"{served.host}:{served.port}" if served else None, root=0)
    return Meeting(served, served.host) if served else _join_store(where, world, timeout)
