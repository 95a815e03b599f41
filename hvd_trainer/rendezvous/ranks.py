"""What the ranks know of each other once they share a store, and what follows from it.

No launcher sets all of it: the number of the node, who shares a GPU, and how many CPUs each rank really has.
"""

from __future__ import annotations

import itertools
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace

import msgspec
import torch.distributed as dist

from hvd_trainer.errors import LaunchError, first_line
from hvd_trainer.launch.slurm import SlurmJob
from hvd_trainer.launch.world import UNKNOWN, World
from hvd_trainer.rendezvous.join import group_hint
from hvd_trainer.utils.network import LOOPBACK


@dataclass(frozen=True)
class RankInfo:
    """A rank, as all other ranks know it."""

    host: str
    """the machine's name"""
    local_rank: int
    """`UNKNOWN` where neither the launcher nor the user has set it, until the ranks have met"""
    backend: str
    cpus: tuple[int, ...]
    """the CPUs it may run on"""
    gpus: tuple[str, ...] = ()
    """the PCI slots of the GPUs that it may use"""
    num_devices: int = 1
    """how many devices it computes on"""
    group: str = ""
    """as in `World`"""
    agent: str = ""
    """the torchrun agent that started it and may do so again"""
    pid: int = 0
    start_time: str = ""
    """of the process: machines and containers may share names, and process numbers are reused"""
    thread: int = 0
    """number of the thread that trains"""
    past_worlds: int = 0
    """how many worlds it has been in before, in elastic mode"""
    stacks_fd: int | None = None
    """its file descriptor of the memory to which it writes its stacks at a signal"""
    status_fd: int | None = None
    """its file descriptor of the memory with its step and phase"""
    address: str = LOOPBACK
    """at which other machines reach its machine"""
    num_ranks: int = 0
    """how many ranks there are, by what this one was told"""

    @property
    def node(self) -> str:
        """The node that its local rank counts in: a machine, or one of several launcher groups on it."""
        return f"{self.host}.{self.group}" if self.group else self.host

    @property
    def gpu(self) -> str | None:
        """The PCI slot of the first GPU that it uses; None if it trains on CPUs."""
        return self.gpus[self.local_rank * self.num_devices % len(self.gpus)] if self.gpus else None


def meet(store: dist.Store, world: World, me: RankInfo) -> tuple[World, list[RankInfo]]:
    """Return this rank's world with all of its numbers, and all ranks in their order. A collective.

    Raises:
        LaunchError: as `exchange_rank_info` and `resolve_nodes`.
    """
    peers = number_local_ranks(exchange_rank_info(store, world, me))
    return resolve_nodes(world, peers), peers


def exchange_rank_info(store: dist.Store, world: World, me: RankInfo) -> list[RankInfo]:
    """Return all ranks in rank order, given this one's own entry. A collective.

    Raises:
        LaunchError: a rank did not take part in time, has another version of this package, was started with
            another backend, or was told another number of ranks; or two processes are the same rank.
    """
    entry = msgspec.json.encode(replace(me, num_ranks=world.size)).decode()
    try:
        if store.compare_set(f"peer/{world.rank}", "", entry).decode() != entry:
            raise LaunchError(
                f"Two processes say that they are {world}: {me.host}'s process {me.pid} is the second. Give each "
                f"its own number from 0 to {world.size - 1} (RANK), or let a launcher start them."
            )
        # Rank 0 collects the entries, so that n ranks cost 3n messages and not n x n.
        if world.is_first:
            entries = [msgspec.Raw(store.get(f"peer/{rank}")) for rank in range(world.size)]
            store.set("peers", msgspec.json.encode(entries).decode())
        everyone = store.get("peers")
        # Rank 0 often serves the store: it must not end, not even by an error, before the others have read.
        if world.is_first:
            store.wait([f"read/{rank}" for rank in range(1, world.size)])
        else:
            store.set(f"read/{world.rank}", "")
    except (dist.DistStoreError, RuntimeError) as error:
        missing = _who_is_missing(store, world)
        raise LaunchError(
            f"{world} waited for all {world.size} ranks, and {missing}: {first_line(error)}. See what "
            f"the others printed, or raise --startup-timeout-s if they start slowly.{group_hint()}"
        ) from None  # the cause's text has the store's keys, which begin with the token
    try:
        peers = msgspec.json.decode(everyone, type=list[RankInfo])
    except msgspec.MsgspecError as error:
        raise LaunchError(
            f"{world} cannot read what another rank says of itself ({first_line(error)}). Install one version "
            f"of hvd_trainer for all ranks."
        ) from None
    told = {**{rank: peer.num_ranks for rank, peer in enumerate(peers)}, world.rank: world.size}
    for rank, number in told.items():
        if number != len(peers):
            raise LaunchError(
                f"Rank {rank} was told that there are {number} ranks, and rank 0 that there are {len(peers)}. Set "
                f"WORLD_SIZE alike on all ranks, or let a launcher start them."
            )
    backends = {peer.backend: rank for rank, peer in reversed(list(enumerate(peers)))}
    if len(backends) > 1:
        chosen = ", ".join(f"rank {rank} {name}" for name, rank in sorted(backends.items()))
        raise LaunchError(
            f"All ranks must use one backend, but found: {chosen}. Give all the same --backend (auto is ddp where "
            f"Horovod is not installed)."
        )
    return peers


def _who_is_missing(store: dist.Store, world: World) -> str:
    """Return which ranks have not come to a meeting that has failed, as far as the store still says."""
    with suppress(dist.DistError, RuntimeError):
        missing = [str(rank) for rank in range(world.size) if not store.check([f"peer/{rank}"])]
        if missing:
            return f"{'rank' if len(missing) == 1 else 'ranks'} {', '.join(missing)} did not come"
    return "not all came"


def number_local_ranks(peers: list[RankInfo]) -> list[RankInfo]:
    """Return the ranks with a local rank each: those without one take the free numbers of their node, by rank.

    So do all ranks of a node where each has local rank 0 and its own GPU: `torchrun --virtual-local-rank` starts
    them so, and shows each process one GPU, as number 0.
    """
    numbered = list(peers)
    for node in {peer.node for peer in peers}:
        members = [rank for rank, peer in enumerate(peers) if peer.node == node]
        local_ranks = [peers[rank].local_rank for rank in members]
        gpus = {peers[rank].gpu for rank in members} - {None}
        if len(gpus) == len(members) > 1 and not any(local_ranks):
            local_ranks = [UNKNOWN] * len(members)
        free = (number for number in itertools.count() if number not in local_ranks)
        for rank, local_rank in zip(members, local_ranks, strict=True):
            numbered[rank] = replace(peers[rank], local_rank=next(free) if local_rank == UNKNOWN else local_rank)
    return numbered


@dataclass(frozen=True)
class JobIdentity:
    """Names by which a job is recognized if its launcher starts it again."""

    names: frozenset[str]
    """of this start; two starts with a name in common are the same job"""
    previous_names: frozenset[str]
    """those that an earlier start of this job may have had"""


def job_identity(peers: list[RankInfo], slurm: SlurmJob) -> JobIdentity:
    """Return the names of a job: torchrun's agents, of which each may start its ranks again, and Slurm's job step.

    Slurm gives a requeued job the same number; a job that was not requeued has no earlier start, but may train
    several times.
    """
    agents = frozenset(f"{peer.host} {peer.agent}" for peer in peers if peer.agent)
    steps = frozenset([f"slurm {slurm.job_id}.{slurm.step_id}"] if slurm.job_id else [])
    return JobIdentity(agents | steps, agents | steps if slurm.restart_count else agents)


def resolve_nodes(world: World, peers: list[RankInfo]) -> World:
    """Return the world with local rank and size, node rank and number of nodes.

    Nodes are numbered by their first rank. A local size that is set stays.

    Raises:
        LaunchError: two ranks on one node have the same local rank, or one has a number that is too large.
    """
    members = Counter(peer.node for peer in peers)
    nodes = list(members)
    seen: dict[tuple[str, int], int] = {}
    for rank, peer in enumerate(peers):
        other = seen.setdefault((peer.node, peer.local_rank), rank)
        if other != rank:
            raise LaunchError(
                f"Ranks {other} and {rank} both say that they are local rank {peer.local_rank} on {peer.host}. "
                f"Give each rank of a node its own LOCAL_RANK, or let a launcher start them."
            )
    me = peers[world.rank]
    if world.local_size == UNKNOWN:
        for rank, peer in enumerate(peers):
            if peer.local_rank >= members[peer.node]:
                raise LaunchError(
                    f"Rank {rank} says that it is local rank {peer.local_rank} on {peer.host}, where "
                    f"{members[peer.node]} of the {world.size} ranks are: local ranks count from 0. Leave "
                    f"LOCAL_RANK out, or set LOCAL_WORLD_SIZE, too."
                )
    return replace(
        world,
        local_rank=me.local_rank,
        local_size=members[me.node] if world.local_size == UNKNOWN else world.local_size,
        node_rank=nodes.index(me.node),
        num_nodes=len(nodes),
    )


def cpu_share(world: World, peers: list[RankInfo]) -> int:
    """Return this rank's share of the CPUs, at least 1: each CPU is divided among the ranks that may run on it.

    Four unbound ranks on 16 CPUs get 4 each; four ranks that the launcher bound to 8 CPUs each get 8.
    """
    me = peers[world.rank]
    neighbours = [peer for peer in peers if peer.host == me.host]
    share = sum(1 / sum(cpu in peer.cpus for peer in neighbours) for cpu in me.cpus)
    return max(1, int(share + 1e-6))


def ranks_sharing_gpu(world: World, peers: list[RankInfo]) -> list[int]:
    """Return the other ranks that would use this rank's GPU, or another slice of it (MIG)."""
    own = peers[world.rank]
    return [
        rank
        for rank, peer in enumerate(peers)
        if rank != world.rank and peer.gpu is not None and (peer.host, peer.gpu) == (own.host, own.gpu)
    ]


def one_per_node_warning(world: World, peers: list[RankInfo]) -> str | None:
    """Return a warning if numbers by hand may be those of nodes, each of which has one rank and several GPUs."""
    num_gpus = min(len(peer.gpus) for peer in peers)
    num_devices = peers[world.rank].num_devices
    if world.launcher != "hand" or world.size == 1 or world.num_nodes < world.size or num_gpus <= num_devices:
        return None
    return (
        f"Each of {world.num_nodes} nodes has one rank, and sees {num_gpus} GPUs. If RANK and WORLD_SIZE count "
        f"nodes here, as on Alibaba's DLC, type on each: torchrun --nnodes $WORLD_SIZE --node-rank $RANK "
        f"--nproc-per-node {num_gpus // num_devices} --master-addr $MASTER_ADDR --master-port $MASTER_PORT ..."
    )


def check_world(world: World, engine: str, rank: int, size: int) -> None:
    """Check that the engine started with the launcher's rank and size.

    Raises:
        LaunchError: it did not: the ranks would train separate models without an error.
    """
    if (rank, size) != (world.rank, world.size):
        raise LaunchError(
            f"{world.launcher} started {world}, but {engine} says rank {rank} of {size}: the ranks would train "
            f"apart. It was probably started before, by other means: leave its start to hvd_trainer, and start "
            f"the job by one launcher only, such as: horovodrun -np {world.size} python -m hvd_trainer.mnist"
        )
