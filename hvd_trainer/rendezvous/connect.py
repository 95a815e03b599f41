"""How the ranks of any launcher find each other, so that any launcher can start either engine.

`open_store` returns a `torch.distributed.Store` that all ranks share. It is served beside rank 0, whose endpoint
(an address and a token) reaches the other ranks by a way that depends on the launcher:

    a group         the store of torch.distributed's default group, if somebody else has made one: Ray Train,
                    Accelerate, Lightning, or the program itself. It listens at MASTER_PORT
    four variables  a store at MASTER_ADDR and MASTER_PORT: all who set RANK and WORLD_SIZE for PyTorch, and
                    launchers of MPI and srun where these two are set, too
    run             the parent process serves the store, and passes the endpoint to each child: ranks on this
                    machine, which need no port that is known before
    horovodrun      its key-value server (HTTP), on several nodes or in elastic mode: it tells no rank's address
    one node        a file that only this user can read: other launchers set no address, or one (torchrun) at
                    which every user of the machine gets an answer
    torchrun        its own store, on several nodes, also those of Spark and TrainJobs: that listens at MASTER_PORT
    srun            a store on the step's first host, at a port computed from the numbers of job and step
    MPI             its own messages (mpi4py): mpirun, mpiexec, PALS, jsrun and Flux on several nodes do not tell
                    where rank 0 is

The stores of torchrun, horovodrun and srun, and one at a given address, answer everyone who can reach them. Where
that is too open, the ranks are given a file with a secret (HVD_TRAINER_SECRET_FILE): see `endpoint.py`. With a
single process there is nothing to find: the store is in memory. What the ranks exchange by the store is in
`ranks.py`.
"""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from hvd_trainer.errors import LaunchError, first_line
from hvd_trainer.launch.launchers import find_launcher
from hvd_trainer.launch.slurm import read_step, slurm_job
from hvd_trainer.launch.world import World, detect, is_elastic
from hvd_trainer.rendezvous.endpoint import parse_endpoint, read_secret
from hvd_trainer.rendezvous.fixed_address import ADDRESS, join_at_address, meet_at, parse_port
from hvd_trainer.rendezvous.join import RendezvousSettings, join_by_registry, join_store, serve_store
from hvd_trainer.rendezvous.ranks import RankInfo, meet
from hvd_trainer.rendezvous.registry import FileRegistry, HttpRegistry, StoreRegistry, job_file
from hvd_trainer.rendezvous.shared_stores import JobStore, shared_stores
from hvd_trainer.rendezvous.store_client import RUN_STORE
from hvd_trainer.utils.network import LOOPBACK, TEST_NET_ADDRESS, outward_address

MAX_ENDPOINT_BYTES = 512


def open_store(
    world: World,
    environ: Mapping[str, str],
    *,
    address: str | None = None,
    timeout_s: float = 300.0,
) -> JobStore:
    """Open the store that all ranks of this job share. A collective.

    A process may call it several times, once for each training: each call begins a session of its own, and keys
    that an earlier session has left in a store are not visible.

    Args:
        address: of this machine, at which rank 0 shall listen; None: that on the route to the others.

    Raises:
        LaunchError: the address is missing, taken, or nobody answers there in time.
    """
    session = shared_stores.next_session()
    if world.size == 1:
        return JobStore(dist.HashStore(), LOOPBACK)
    settings = RendezvousSettings(
        world=world,
        environ=environ,
        session=session,
        secret=read_secret(environ),
        address=address,
        timeout=timedelta(seconds=timeout_s),
    )
    joined = _join(settings)
    return JobStore(dist.PrefixStore(session, joined.store), joined.host)


def find_place(environ: Mapping[str, str], timeout_s: float) -> World:
    """Return this process's place, also on its node. A collective where launchers may leave that out.

    Raises:
        LaunchError: as `open_store` and `ranks.meet`.
    """
    launcher, world = find_launcher(environ), detect(environ)
    if world.size == 1 or launcher is None or launcher.tells_place:
        return world
    host = world.host or socket.gethostname()
    me = RankInfo(host, world.local_rank, backend="", cpus=(), group=world.group, pid=os.getpid())
    return meet(open_store(world, environ, timeout_s=timeout_s).store, world, me)[0]


def _join(settings: RendezvousSettings) -> JobStore:
    """Join by the way that fits the launcher and the number of nodes."""
    if dist.is_initialized():
        return _join_by_group(settings)
    launcher, is_one_node = settings.world.launcher, settings.world.num_nodes == 1
    has_own_way = launcher in ("run", "horovodrun", "torchrun")
    if launcher == "hand" or (settings.environ.keys() >= {*ADDRESS} and not has_own_way):
        return join_at_address(settings)
    if launcher == "run":
        return join_store(parse_endpoint(settings.variable(RUN_STORE)), settings)
    if launcher == "horovodrun":
        host = settings.variable("HOROVOD_GLOO_RENDEZVOUS_ADDR")
        port = parse_port(settings.variable("HOROVOD_GLOO_RENDEZVOUS_PORT"))
        registry = HttpRegistry(host, port, settings.session)
        if not is_one_node:
            return join_by_registry(registry, settings, settings.address or outward_address(host, port))
        if is_elastic(settings.environ):
            return join_by_registry(registry, settings, LOOPBACK)
        registry.lookup()  # raises if horovodrun has ended
    if is_one_node and (file := job_file(settings.world, settings.environ, settings.session)) is not None:
        return join_by_registry(FileRegistry(file), settings, LOOPBACK)
    if launcher == "torchrun":
        return _join_by_torchrun(settings)
    if launcher == "srun":
        return _join_by_srun(settings)
    return _join_by_mpi(settings)


def _join_by_group(settings: RendezvousSettings) -> JobStore:
    store = server = dist.distributed_c10d._get_default_store()
    while isinstance(server, dist.PrefixStore):
        server = server.underlying_store
    host = getattr(server, "host", TEST_NET_ADDRESS)  # of a TCPStore
    address = settings.address or outward_address(host, 1)
    return join_by_registry(StoreRegistry(store, settings.session), settings, address)


def _join_by_torchrun(settings: RendezvousSettings) -> JobStore:
    host, port = settings.variable("MASTER_ADDR"), parse_port(settings.variable("MASTER_PORT"))
    store = shared_stores.get(f"{host}:{port}", lambda: _open_torchrun_store(f"{host}:{port}", settings))
    address = settings.address or outward_address(host, port)
    return join_by_registry(StoreRegistry(store, settings.session), settings, address)


def _open_torchrun_store(place: str, settings: RendezvousSettings) -> dist.Store:
    world, timeout = settings.world, settings.timeout
    try:
        store: dist.Store = next(dist.rendezvous("env://", world.rank, world.size, timeout=timeout))[0]
    except (dist.DistError, RuntimeError, ValueError, OSError) as error:
        raise LaunchError(
            f"{world} could not meet the others at {place}: {first_line(error)}. If the port is in use, choose "
            f"another: torchrun --master-port N; if no rank 0 listens there, start all {world.size} ranks."
        ) from error
    return store


def _join_by_srun(settings: RendezvousSettings) -> JobStore:
    """Join at the step's first host, and a port computed from the step's number."""
    step = read_step(settings.environ)
    # Another step whose port is the same has another name: its ranks never take this one's rank 0 for theirs.
    name = f"{step.job}.{step.number} start {slurm_job(settings.environ).restart_count} {settings.session}"
    return meet_at(node_address(step.master_address), step.master_port, settings, name)


def node_address(node: str) -> str:
    """Return the address of a node: its name if that resolves, else the address that Slurm has for it.

    Raises:
        LaunchError: neither resolves.
    """
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


def _join_by_mpi(settings: RendezvousSettings) -> JobStore:
    world = settings.world
    try:
        from mpi4py import MPI
    except ImportError:
        raise LaunchError(
            f"{world.launcher} started ranks on several nodes and does not tell them where rank 0 is. Type: pip "
            f"install mpi4py, or pass the address: mpirun -x MASTER_ADDR=HOST_OF_RANK_0 -x MASTER_PORT=29500; for "
            f"other launchers, export both"
        ) from None
    if (known := MPI.COMM_WORLD.Get_size()) != world.size:
        raise LaunchError(
            f"{world.launcher} started {world.size} ranks, and mpi4py's MPI knows of {known}: it is another MPI. "
            f"Type on every rank: export MASTER_ADDR=HOST_OF_RANK_0 MASTER_PORT=29500"
        )
    text = ""
    if world.is_first:
        text = str(serve_store(world, settings.address or outward_address(TEST_NET_ADDRESS, 1), 0))
    message = bytearray(text.encode().ljust(MAX_ENDPOINT_BYTES))
    MPI.COMM_WORLD.Bcast(message, root=0)  # of bytes: MPI's `bcast` would unpickle
    return join_store(parse_endpoint(message.decode().rstrip()), settings)
