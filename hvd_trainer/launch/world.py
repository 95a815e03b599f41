"""This process's place among the ranks, read from the variables of any launcher, here and nowhere else.

`detect` is a pure function of a mapping, so that it can be tested without a cluster. The names of the variables
are in `launchers.LAUNCHERS`. `find_world` asks the default group of torch.distributed first, if somebody else has
made one: Ray Train, Accelerate, Lightning, or the program itself.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, replace

from hvd_trainer.errors import LaunchError
from hvd_trainer.launch.launchers import (
    BY_HAND,
    CHOICE,
    HAND,
    LAUNCHERS,
    NUMBER,
    Launcher,
    find_launcher,
    read_number,
)
from hvd_trainer.launch.slurm import expand_counts

UNKNOWN = -1
"""Of a number that the launcher does not set: found out when the ranks exchange `RankInfo`."""


@dataclass(frozen=True)
class World:
    """This process among all processes of the job.

    `rank` of `size` processes; `local_rank` of the `local_size` processes on this node; node `node_rank` of
    `num_nodes`. Where the launcher does not set the last four, they are `UNKNOWN` until the rendezvous.

    Raises:
        LaunchError: the numbers contradict each other.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1
    launcher: str = "python"
    host: str = ""
    """the node's name in the launcher's words; empty if it does not set it"""
    group: str = ""
    """number of the launcher's process on the node, which tells apart nodes on one machine; empty without one"""

    def __post_init__(self) -> None:
        for index, count in (("rank", "size"), ("local_rank", "local_size"), ("node_rank", "num_nodes")):
            i, n = getattr(self, index), getattr(self, count)
            if index != "rank" and UNKNOWN in (i, n):
                continue
            if not 0 <= i < n:
                raise LaunchError(
                    f"{self.launcher} says {index} {i} of {count} {n}, which cannot be. "
                    f"{self._advice(index, count)}"
                )
        if self.local_size > self.size:
            raise LaunchError(
                f"{self.launcher} says {self.local_size} processes on this node but only {self.size} in all. "
                f"{self._advice('local_size', 'size')}"
            )

    @classmethod
    def somewhere(cls, rank: int, size: int, launcher: str) -> World:
        """Return the world of a rank whose node is not known yet."""
        return cls(rank, size, UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN, launcher)

    def _advice(self, *numbers: str) -> str:
        """Return what to type if these numbers contradict each other."""
        row = next((launcher for launcher in LAUNCHERS if launcher.name == self.launcher), None)
        names = [name for number in numbers if (name := getattr(row, number, ""))]
        if self.launcher == "hand":
            return f"Set {' and '.join(names)} on each rank: they count from 0 to one less than there are."
        return f"Leave {' and '.join(names) or 'these numbers'} to {self.launcher}, or start the ranks again."

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which prints and writes."""
        return self.rank == 0

    @property
    def is_first_on_node(self) -> bool:
        """Whether this is the one rank of its node that downloads."""
        return self.local_rank == 0

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size}"


def detect(environ: Mapping[str, str] | None = None) -> World:
    """Return this process's place in the job, from its environment variables.

    Args:
        environ: the variables; None: `os.environ`.

    Returns:
        The world by the variables of the first matching row of `LAUNCHERS`; a single process if none matches.

    Raises:
        LaunchError: some of a launcher's variables are missing, are not numbers, or contradict each other. A
            missing rank is never taken for 0.
    """
    environ = os.environ if environ is None else environ
    launcher = find_launcher(environ)
    if launcher is None:
        return World()
    world = _read(launcher, environ)
    if launcher in BY_HAND and CHOICE not in environ:
        _check_launcher_above(world, environ)
    return world


def _check_launcher_above(world: World, environ: Mapping[str, str]) -> None:
    """See that the launcher's processes are not more than the ranks that the variables by hand speak of.

    They may have more ranks below them. But variables of one pod in which a launcher starts several processes
    would make each of them the same rank.

    Raises:
        LaunchError: they are.
    """
    for launcher in LAUNCHERS:
        if launcher in BY_HAND or not launcher.evidence(environ) or launcher.missing(environ):
            continue
        if (size := read_number(environ, launcher.size)) > world.size:
            raise LaunchError(
                f"{HAND.rank} and {HAND.size} say {world}, but {launcher.name} has started {size} processes "
                f"({launcher.size}). Type before it: unset {' '.join(HAND.variables())}; or give each process its "
                f"own numbers in them"
            )


GROUP = "torch.distributed"
"""What has started the ranks where only its group says who they are."""


def find_world(environ: Mapping[str, str]) -> World:
    """Return this process's place in the job: that in the default group of torch.distributed, if there is one.

    The launcher's variables say the rest, if they are those of the same rank: some leave another rank's there
    (Accelerate without a launcher), and a script may have started more ranks than the launcher.

    Raises:
        LaunchError: as `detect`; or the group is another one than the variables speak of.
    """
    if (place := _place_in_group()) is None:
        return detect(environ)
    rank, size = place
    launcher = find_launcher(environ)
    if launcher is None or launcher.missing(environ):
        local_rank, local_size = (_optional_number(environ, name) for name in (HAND.local_rank, HAND.local_size))
        return _located(World(rank, size, local_rank, local_size, UNKNOWN, UNKNOWN, GROUP))
    world = detect(environ)
    if (world.rank, world.size) == place:
        return world
    if size < world.size or (size != world.size and launcher.size == HAND.size):
        raise LaunchError(
            f"{world.launcher} started {world}, but {GROUP}, already initialised, says rank {rank} of {size}: the "
            f"ranks would train apart. Give init_process_group the world_size that {launcher.size} says, or unset "
            f"that variable"
        )
    return _located(World.somewhere(rank, size, GROUP))


def _place_in_group() -> tuple[int, int] | None:
    """Return rank and size in the default group of torch.distributed; None if this process has none."""
    dist = sys.modules.get(GROUP)
    if dist is None or not getattr(dist, "is_initialized", bool)():  # it is being imported, or PyTorch lacks it
        return None
    return dist.get_rank(), dist.get_world_size()


def _read(launcher: Launcher, environ: Mapping[str, str]) -> World:
    if missing := launcher.missing(environ):
        rows = [row for row in LAUNCHERS if row.name == launcher.name]
        names = dict.fromkeys(name for row in rows for name in (*row.markers, *row.variables()))
        by = "by hand" if launcher.name == "hand" else f"by {launcher.name}"
        raise LaunchError(
            f"{launcher.evidence(environ)[0]} is set, so this process looks started {by}, but "
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not. Set what is missing or let a "
            f"launcher start all ranks, such as: horovodrun -np 2 python -m hvd_trainer.mnist; to run one process "
            f"alone, type: unset {' '.join(name for name in names if name in environ)}"
        )
    node_rank = _optional_number(environ, launcher.node_rank)
    world = World(
        rank=read_number(environ, launcher.rank),
        size=read_number(environ, launcher.size),
        local_rank=_optional_number(environ, launcher.local_rank),
        local_size=(
            _optional_number(environ, launcher.local_size)
            if node_rank == UNKNOWN
            else _tasks_on_node(environ, launcher, node_rank)
        ),
        node_rank=node_rank,
        num_nodes=_optional_number(environ, launcher.num_nodes),
        launcher=launcher.name,
        host=environ.get(launcher.host, ""),
        group=environ.get(launcher.group, ""),
    )
    return _located(world)


def _located(world: World) -> World:
    """Return a world with what follows from the numbers that are known of its nodes."""
    if world.num_nodes == 1 and world.local_size == UNKNOWN:
        world = replace(world, local_size=world.size, node_rank=0)
    if world.size == 1:
        world = replace(world, local_rank=max(0, world.local_rank), local_size=1)
    if world.node_rank == UNKNOWN and world.local_size == world.size:
        world = replace(world, node_rank=0, num_nodes=1)
    return world


def _optional_number(environ: Mapping[str, str], name: str) -> int:
    return read_number(environ, name) if name in environ else UNKNOWN


def _tasks_on_node(environ: Mapping[str, str], launcher: Launcher, node_rank: int) -> int:
    text, size = environ[launcher.local_size], read_number(environ, launcher.size)
    counts = expand_counts(text)
    if not 0 <= node_rank < len(counts):
        raise LaunchError(
            f"{launcher.local_size}={text} speaks of {len(counts)} nodes, but {launcher.node_rank} is {node_rank}."
        )
    if sum(counts) != size:
        raise LaunchError(
            f"{launcher.local_size}={text} makes {sum(counts)} tasks, but {launcher.size} is {size}. One of the "
            f"two was changed by hand: leave both to {launcher.name}."
        )
    return counts[node_rank]


def lone_process_warning(world: World, environ: Mapping[str, str]) -> str | None:
    """Return a warning if one process trains alone in a Slurm job of several tasks, or in a TrainJob; else None.

    It was started by plain `python` in a batch script or under salloc, whose own shell may be a step of one task;
    or in a pod of Kubeflow's, which is given options of torchrun as variables.
    """
    tasks = environ.get("SLURM_NTASKS", "1")
    alone = world.size == 1 and world.launcher in ("python", "srun")
    if alone and tasks.isdecimal() and int(tasks[:9]) > 1:
        return f"This Slurm job has {tasks} tasks, but this is one process and trains alone. Type: srun python ..."
    nodes = environ.get("PET_NNODES", "1")
    if world.size == 1 and world.launcher == "python" and nodes != "1":
        return f"PET_NNODES={nodes} is for torchrun, but this is one process and trains alone. Type: torchrun ..."
    return None


def is_rank(environ: Mapping[str, str]) -> bool:
    """Return whether a launcher has started this process as one of several.

    None has where its variables are those of a shell (Slurm's interactive step), of a pod (by hand), or of the
    script of another `run`, which has started this process.
    """
    launcher = find_launcher(environ)
    is_inherited = launcher in (None, *BY_HAND) or CHOICE in environ
    return not is_inherited and detect(environ).size > 1


def own_job_warning(environ: Mapping[str, str]) -> str | None:
    """Return a warning for a process that starts ranks where those of others are set by hand; else None."""
    size = environ.get(HAND.size, "")
    if (
        CHOICE in environ
        or find_launcher(environ) not in BY_HAND
        or not re.fullmatch(NUMBER, size)
        or int(size) < 2
    ):
        return None
    return (
        f"{HAND.size}={size} is set, as for one of {size} ranks, and --np starts a job of its own on this "
        "machine. To be one of these ranks, leave --np out"
    )


def may_be_first(environ: Mapping[str, str]) -> bool:
    """Return False if the group or the variables, even if some are missing, say that this is not rank 0.

    A rank that is no number, or that the size leaves no place for, may be: no rank 0 would say so in its place.
    """
    if (place := _place_in_group()) is not None:
        return place[0] == 0
    launcher = find_launcher(environ)
    if launcher is None or not re.fullmatch(NUMBER, rank := environ.get(launcher.rank, "0")):
        return True
    size = environ.get(launcher.size, "")
    return int(rank) == 0 or (re.fullmatch(NUMBER, size) is not None and int(rank) >= int(size))


def is_elastic(environ: Mapping[str, str]) -> bool:
    """Return True for a rank of horovodrun's elastic mode, in which ranks come and go while others train."""
    launcher = find_launcher(environ)
    return launcher is not None and launcher.name == "horovodrun" and environ.get("HOROVOD_ELASTIC") == "1"


def set_world(environ: MutableMapping[str, str], **numbers: int) -> None:
    """Set the launcher's variables to another place of this process, by the names in `Launcher`.

    Those that scripts read beside them, too, if they were set.
    """
    for launcher in LAUNCHERS:
        if launcher == find_launcher(environ) or (launcher.name == "hand" and launcher.evidence(environ)):
            environ.update({getattr(launcher, name): str(number) for name, number in numbers.items()})


def rank_variables(launcher: str, world: World) -> dict[str, str]:
    """Return the variables in which a launcher tells a process its rank and local rank, each with their number."""
    row = next(row for row in LAUNCHERS if row.name == launcher)
    return {getattr(row, name): str(getattr(world, name)) for name in ("rank", "size", "local_rank", "local_size")}
