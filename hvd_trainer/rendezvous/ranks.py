"""What the ranks tell each other once they share a store, and what follows from it.

No launcher tells all of it: the number of the node, who shares a GPU, and how many CPUs each rank really has.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace

import torch.distributed as dist

from hvd_trainer.errors import LaunchError, first_line
from hvd_trainer.launch.world import UNKNOWN, SlurmJob, World
from hvd_trainer.utils.network import LOOPBACK


@dataclass(frozen=True)
class RankInfo:
    """What a rank tells the others about itself."""

    host: str
    """The machine."""
    local_rank: int
    backend: str
    cpus: tuple[int, ...]
    gpu: str | None = None
    """The PCI slot of the GPU it will use."""
    group: str = ""
    """As in `World`."""
    starter: str = ""
    """The process that started it, where that may do so again."""
    process: int = 0
    started: str = ""
    """When that process was: machines and containers may share names, and numbers of processes too."""
    worlds: int = 0
    """How many it has been in before, where ranks come and go."""
    memory: int | None = None
    """Its file descriptor of the stacks that it writes when it is asked for them by a signal."""
    page: int | None = None
    """And that of the page with its step and phase."""
    address: str = LOOPBACK
    """At which other machines reach its own."""

    @property
    def node(self) -> str:
        """What local ranks are counted in."""
        return f"{self.host}.{self.group}" if self.group else self.host


def exchange_rank_info(store: dist.Store, world: World, me: RankInfo) -> list[RankInfo]:
    """Every rank tells who it is and learns who the others are: one entry per rank, in rank order.

    Raises:
        LaunchError: a rank did not come in time, or two ranks were started with different backends.
    """
    store.set(f"peer/{world.rank}", json.dumps(asdict(me)))
    try:
        # Rank 0 collects, so that n ranks cost 3n messages and not n x n.
        if world.is_first:
            keys = [f"peer/{rank}" for rank in range(world.size)]
            everyone = [json.loads(store.get(key)) for key in keys]
            store.set("peers", json.dumps(everyone))
        everyone = json.loads(store.get("peers"))
        # Rank 0 often holds the store: it may not go, not even with an error, before the others have read.
        if world.is_first:
            store.wait([f"read/{rank}" for rank in range(1, world.size)])
        else:
            store.set(f"read/{world.rank}", "")
    except (dist.DistStoreError, RuntimeError) as error:
        raise LaunchError(
            f"{world} waited for all {world.size} ranks and not all came: {first_line(error)}. "
            f"See what the others printed, or raise --startup-timeout-s if they start slowly."
        ) from None  # whose own text has the store's keys, which begin with the token
    peers = [RankInfo(**{**entry, "cpus": tuple(entry["cpus"])}) for entry in everyone]
    backends = {peer.backend: rank for rank, peer in reversed(list(enumerate(peers)))}
    if len(backends) > 1:
        found = ", ".join(f"rank {rank} {name}" for name, rank in sorted(backends.items()))
        raise LaunchError(f"All ranks must use one backend, but found: {found}. Give all the same --backend.")
    return peers


def number_virtual_ranks(peers: list[RankInfo]) -> list[RankInfo]:
    """Return the peers with local ranks counted by rank on nodes where each says 0 and has a GPU of its own.

    So `torchrun --virtual-local-rank` starts them, which shows each process one GPU, as number 0.
    """
    numbered = list(peers)
    for node in {peer.node for peer in peers}:
        here = [rank for rank, peer in enumerate(peers) if peer.node == node]
        gpus = {peers[rank].gpu for rank in here} - {None}
        if len(gpus) == len(here) > 1 and not any(peers[rank].local_rank for rank in here):
            for number, rank in enumerate(here):
                numbered[rank] = replace(peers[rank], local_rank=number)
    return numbered


@dataclass(frozen=True)
class JobIdentity:
    """By what a job is known that its launcher may start several times."""

    names: frozenset[str]
    """of this start: one of them, and it is the same job"""
    earlier: frozenset[str]
    """of those that an earlier start of this job may have had"""


def job_identity(peers: list[RankInfo], slurm: SlurmJob) -> JobIdentity:
    """torchrun starts ranks again from its own processes, of which some may have gone and others come since.

    Slurm gives a requeued job its number again; but one that was not requeued may train several times.
    """
    starters = frozenset(f"{peer.host} {peer.starter}" for peer in peers if peer.starter)
    queued = frozenset([f"slurm {slurm.number}.{slurm.step}"] if slurm.number else [])
    return JobIdentity(starters | queued, starters | queued if slurm.restarts else starters)


def resolve_nodes(world: World, peers: list[RankInfo]) -> World:
    """Complete the world by its local rank and the number of its node, counted in the order of their first rank.

    Raises:
        LaunchError: two ranks on one node have the same local rank.
    """
    nodes = list(dict.fromkeys(peer.node for peer in peers))
    seen: dict[tuple[str, int], int] = {}
    for rank, peer in enumerate(peers):
        other = seen.setdefault((peer.node, peer.local_rank), rank)
        if other != rank:
            raise LaunchError(
                f"Ranks {other} and {rank} both say that they are local rank {peer.local_rank} on {peer.host}. "
                f"Give each rank of a node its own LOCAL_RANK, or let a launcher start them."
            )
    me = peers[world.rank]
    node_rank = nodes.index(me.node)
    world = replace(world, local_rank=me.local_rank)
    if world.node_rank != UNKNOWN and (world.node_rank, world.num_nodes) == (node_rank, len(nodes)):
        return world
    return replace(world, node_rank=node_rank, num_nodes=len(nodes))


def fair_cpus(world: World, peers: list[RankInfo]) -> int:
    """How many CPUs are this rank's own share: each CPU is divided among the ranks that may run on it.

    Four unbound ranks on 16 CPUs get 4 each; four ranks that the launcher bound to 8 CPUs each get 8.
    """
    me = peers[world.rank]
    neighbours = [peer for peer in peers if peer.host == me.host]
    share = sum(1 / sum(cpu in peer.cpus for peer in neighbours) for cpu in me.cpus)
    return max(1, int(share + 1e-6))


def sharing_gpu(world: World, peers: list[RankInfo]) -> list[int]:
    """Return the other ranks that would use this rank's GPU, or another slice of it (MIG)."""
    mine = peers[world.rank]
    return [
        rank
        for rank, peer in enumerate(peers)
        if rank != world.rank and peer.gpu is not None and (peer.host, peer.gpu) == (mine.host, mine.gpu)
    ]


def check_world(world: World, engine: str, rank: int, size: int) -> None:
    """The guard: what the engine says must be what the launcher said.

    Raises:
        LaunchError: it is not, so that the ranks would train apart without anybody noticing.
    """
    if (rank, size) != (world.rank, world.size):
        raise LaunchError(
            f"{world.launcher} started {world}, but {engine} says rank {rank} of {size}: the ranks would train "
            f"apart. It was probably started before, by other means: leave its start to hvd_trainer, and start "
            f"the job by one launcher only, such as: horovodrun -np {world.size} python -m hvd_trainer.mnist"
        )
