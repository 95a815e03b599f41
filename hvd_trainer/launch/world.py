"""Who am I? The rank variables of every launcher, read here and nowhere else.

`detect` is a pure function of a mapping, so that it can be tested without a cluster. A launcher is one
row of variable names. The most specific launcher comes first and the scheduler last, because processes
that mpirun or torchrun start inside a Slurm allocation see Slurm's variables too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, replace
from pathlib import Path

from hvd_trainer.errors import LaunchError
from hvd_trainer.launch.launchers import LAUNCHERS, Launcher

UNKNOWN = -1
"""The node's number, where the launcher does not tell it: the ranks find it out when they meet."""


@dataclass(frozen=True)
class World:
    """This process among all processes of the job.

    `rank` of `size` processes; `local_rank` of the `local_size` processes on this node; node `node_rank` of
    `num_nodes`. The last two are `UNKNOWN` until the ranks have met, where the launcher does not give them.

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
    """The node's name as the launcher knows it; empty where it does not say."""
    group: str = ""
    """What tells this node from another one that is the same machine; empty where nothing does."""

    def __post_init__(self) -> None:
        for index, count in (
            ("rank", "size"),
            ("local_rank", "local_size"),
            ("node_rank", "num_nodes"),
        ):
            i, n = getattr(self, index), getattr(self, count)
            if (i, n) == (UNKNOWN, UNKNOWN) and index == "node_rank":
                continue
            if not 0 <= i < n:
                raise LaunchError(
                    f"{self.launcher} says {index} {i} of {count} {n}, which cannot be. {self._mend(index, count)}"
                )
        if self.local_size > self.size:
            raise LaunchError(
                f"{self.launcher} says {self.local_size} processes on this node but only {self.size} in all. "
                f"{self._mend('local_size', 'size')}"
            )

    def _mend(self, *numbers: str) -> str:
        """What to do about numbers that contradict each other."""
        row = next((launcher for launcher in LAUNCHERS if launcher.name == self.launcher), None)
        names = [name for number in numbers if (name := getattr(row, number, ""))]
        if self.launcher == "hand":
            return f"Set {' and '.join(names)} on each rank: they count from 0 to one less than there are."
        return f"Leave {' and '.join(names) or 'these numbers'} to {self.launcher}, or start the ranks anew."

    @property
    def is_first(self) -> bool:
        """Rank 0: the one that prints and writes."""
        return self.rank == 0

    @property
    def is_first_on_node(self) -> bool:
        """The one rank per node that downloads."""
        return self.local_rank == 0

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size}"


def detect(environ: Mapping[str, str]) -> World:
    """Reads this process's place in the job from its environment variables.

    Args:
        environ: the environment, as `os.environ`.

    Returns:
        The world that the first matching row of `LAUNCHERS` describes; one process where none matches.

    Raises:
        LaunchError: a launcher's variables are set in part, are not numbers, or contradict each other.
            A missing rank is never taken for 0.
    """
    launcher = launcher_in(environ)
    return World() if launcher is None else _read(launcher, environ)


def launcher_in(environ: Mapping[str, str]) -> Launcher | None:
    """The launcher whose variables are there, in whole or in part; None: this process was started by none."""
    return next((launcher for launcher in LAUNCHERS if launcher.signs(environ)), None)


def _read(launcher: Launcher, environ: Mapping[str, str]) -> World:
    names = launcher.variables()
    missing = [name for name in names if name not in environ]
    if missing:
        raise LaunchError(
            f"{launcher.signs(environ)[0]} is set, so this process looks started {_by(launcher)}, but "
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not. Set what is missing or let a "
            f"launcher start all ranks, such as: horovodrun -np 2 python -m hvd_trainer.mnist; to run one process "
            f"alone, type: unset {' '.join(n for n in (*launcher.markers, *names) if n in environ)}"
        )
    node_rank = read_number(environ, launcher.node_rank) if launcher.node_rank else UNKNOWN
    world = World(
        rank=read_number(environ, launcher.rank),
        size=read_number(environ, launcher.size),
        local_rank=read_number(environ, launcher.local_rank),
        local_size=(
            read_number(environ, launcher.local_size)
            if node_rank == UNKNOWN
            else _tasks_on_node(environ, launcher, node_rank)
        ),
        node_rank=node_rank,
        num_nodes=read_number(environ, launcher.num_nodes) if launcher.num_nodes else UNKNOWN,
        launcher=launcher.name,
        host=environ.get(launcher.host, ""),
        group=environ.get(launcher.group, ""),
    )
    if world.node_rank == UNKNOWN and world.local_size == world.size:
        world = replace(world, node_rank=0, num_nodes=1)
    return world


def _by(launcher: Launcher) -> str:
    return "by hand" if launcher.name == "hand" else f"by {launcher.name}"


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


def read_number(environ: Mapping[str, str], name: str) -> int:
    """The whole number that a variable holds.

    Raises:
        LaunchError: it holds something else.
    """
    # Not int(): it takes "1_0", "+1" and other alphabets' digits, which no launcher writes.
    if not re.fullmatch(r"[0-9]{1,10}", environ[name]):
        raise LaunchError(
            f"{name} should be a whole number, but is {shorten(environ[name])}. Leave it to the launcher, or "
            f"type: export {name}=NUMBER"
        )
    return int(environ[name])


def shorten(text: str) -> str:
    """A text as an error shows it, and not more than a line of it."""
    return repr(text if len(text) <= 60 else text[:60] + "...")


def expand_counts(text: str) -> list[int]:
    """Slurm's tasks per node: `"4(x2),2"` means 4, 4 and 2.

    Raises:
        LaunchError: the text is not of that form.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", part)
        if match is None:
            raise LaunchError(f"SLURM_STEP_TASKS_PER_NODE should look like 4(x2),2 but is {shorten(text)}.")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def lone_process_warning(world: World, environ: Mapping[str, str]) -> str | None:
    """What to say when one process trains alone where several ranks were probably meant.

    That is plain `python` in a batch script or under salloc; salloc's own shell may be a step of one task.
    """
    tasks = environ.get("SLURM_NTASKS", "1")
    alone = world.size == 1 and world.launcher in ("python", "srun")
    if alone and tasks.isdecimal() and int(tasks[:9]) > 1:
        return f"This Slurm job has {tasks} tasks, but this is one process and trains alone. Type: srun python ..."
    return None


def may_be_first(environ: Mapping[str, str]) -> bool:
    """False only if the launcher's variables, even if they are not whole, say that this is not rank 0."""
    launcher = launcher_in(environ)
    return launcher is None or environ.get(launcher.rank, "0") == "0"


def is_elastic(environ: Mapping[str, str]) -> bool:
    """Whether this is a rank of a horovodrun that may start and end ranks while others train."""
    launcher = launcher_in(environ)
    return launcher is not None and launcher.name == "horovodrun" and environ.get("HOROVOD_ELASTIC") == "1"


def set_world(environ: MutableMapping[str, str], **numbers: int) -> None:
    """Gives this process another place among the ranks of its launcher, by the names in `Launcher`."""
    launcher = launcher_in(environ)
    environ.update({getattr(launcher, name): str(number) for name, number in numbers.items()})


def slurm_step(environ: Mapping[str, str]) -> str | None:
    """The `JOB.STEP` whose tasks are this job's ranks; None if srun did not start them."""
    launcher = launcher_in(environ)
    if launcher is None or launcher.name != "srun" or not {"SLURM_JOB_ID", "SLURM_STEP_ID"} <= environ.keys():
        return None
    return f"{environ['SLURM_JOB_ID']}.{environ['SLURM_STEP_ID']}"


@dataclass(frozen=True)
class SlurmJob:
    """The Slurm job that this process runs in."""

    number: str | None
    """as Slurm's commands take it, for this job alone; None outside of one"""
    step: str
    restarts: int
    """how often it was put back into the queue"""


def slurm_job(environ: Mapping[str, str]) -> SlurmJob:
    """What Slurm says of its job."""
    count = environ.get("SLURM_RESTART_COUNT", "")
    job, step = environ.get("SLURM_JOB_ID"), environ.get("SLURM_STEP_ID", "")
    # One task of an array has the array's own number, by which Slurm's commands mean all of its tasks. The others
    # have numbers of their own; a job that one of them submits, too, and it inherits the array's variables.
    if job is not None and job == environ.get("SLURM_ARRAY_JOB_ID") and "SLURM_ARRAY_TASK_ID" in environ:
        job = f"{job}_{environ['SLURM_ARRAY_TASK_ID']}"
    return SlurmJob(job, step, int(count) if count.isdecimal() else 0)


def process_start_time(process: int) -> str:
    """When a process of this machine was started, in a form that only serves to tell it from others.

    Raises:
        OSError: there is no such process to be seen.
    """
    # Ticks since the machine's start: the time of day would move with the clock.
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]


def cpu_ids() -> tuple[int, ...]:
    """The CPUs that this process may run on (a launcher may have bound it to a few)."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))
