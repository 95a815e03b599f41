"""Slurm's variables: the job, and the step of this process with its hosts, ranks per node, CPUs, GPUs and array.

A step is what one srun started. It may have fewer tasks and nodes than its job, and the environment has the
numbers of both: what differs is read from the step's own variables. Slurm abbreviates lists, such as
`gpu[03-05,9]` for hosts and `4(x2),2` for numbers of tasks; here they are expanded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product, takewhile
from math import prod

from hvd_trainer.errors import LaunchError
from hvd_trainer.launch.launchers import find_launcher, read_number, shorten

FIRST_PORT, NUM_PORTS = 20_000, 12_000
"""Below Linux's ephemeral ports, which begin at 32768."""
STEPS_PER_JOB = 61
"""Distance between the ports of one job and of the next: so many steps of a job have ports of their own."""
PORTS_PER_STEP = 4
MAX_HOSTS = 100_000
"""More than any cluster has: expanding a longer list, which is a mistake, would fill the memory."""
GPU_VARIABLES = (
    *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"),
    *("SLURM_STEP_GPUS", "SLURM_JOB_GPUS"),
)
"""The first of them that is set has the GPUs that a process sees. Slurm's own come last: they may list all of the
node's GPUs where each task is bound to one."""


@dataclass(frozen=True)
class SlurmStep:
    """The Slurm step that this process is a task of.

    A script that calls `torch.distributed` itself finds an address and a port here; a `Trainer` needs neither.
    """

    job: int
    """the job's number, which each task of an array has for itself"""
    number: int
    """the step's number in its job"""
    host: str
    """the name of this node"""
    hosts: tuple[str, ...]
    """the names of all its nodes, in the order of their numbers"""
    ranks_per_node: tuple[int, ...]
    """how many ranks each of the hosts has, which may differ"""
    cpus_per_task: int | None
    """a rank's share of the CPUs that the step has on this node; None: Slurm did not set it. Ranks may be bound to
    fewer: see `os.sched_getaffinity`"""
    gpu_ids: tuple[str, ...] | None
    """the GPUs that this process sees: numbers, or names such as `GPU-8932f937`; None: all of the node's"""
    array: tuple[int, int] | None
    """the number of the array and of this task in it; None: the job is in no array"""
    scattered: bool
    """whether tasks were placed by a list (`srun --distribution=arbitrary`), and rank 0 is on any of the hosts"""

    @property
    def ports(self) -> tuple[int, ...]:
        """The ports at which rank 0 may listen, in this order; all ranks compute the same ones.

        The first port of two steps differs if their jobs' numbers are less than 196 apart and both are among the
        first 61 steps of their jobs.
        """
        first = self.job * STEPS_PER_JOB + self.number
        distance = NUM_PORTS // PORTS_PER_STEP
        return tuple(FIRST_PORT + (first + distance * i) % NUM_PORTS for i in range(PORTS_PER_STEP))

    @property
    def master_address(self) -> str:
        """The host of rank 0.

        Raises:
            LaunchError: Slurm does not set it.
        """
        if self.scattered:
            raise LaunchError(
                f"srun --distribution=arbitrary does not tell on which of {', '.join(self.hosts)} rank 0 is. Type "
                f"before srun: export MASTER_ADDR=HOST_OF_RANK_0"
            )
        return self.hosts[0]

    @property
    def master_port(self) -> int:
        """The first of `ports`."""
        return self.ports[0]


STEP_VARIABLES = (
    *("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID"),
)


def detect_slurm(environ: Mapping[str, str]) -> SlurmStep | None:
    """Return the Slurm step that srun started this process in.

    Returns:
        None if there is no step: outside of Slurm, and in a batch script that has not called srun.

    Raises:
        LaunchError: some of Slurm's variables are missing, malformed, or contradict each other.
    """
    return read_step(environ) if "SLURM_STEP_ID" in environ else None


def read_step(environ: Mapping[str, str]) -> SlurmStep:
    """Return the step of a process that srun started.

    Raises:
        LaunchError: as `detect_slurm`.
    """
    missing = [name for name in STEP_VARIABLES if name not in environ]
    if missing:
        raise LaunchError(
            f"srun should set {', '.join(missing)} and has not, so the ranks cannot find each other. Were its "
            f"other variables set by hand? Set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and "
            f"MASTER_PORT instead."
        )
    hosts = expand_hosts(environ["SLURM_STEP_NODELIST"])
    counts = expand_counts(environ["SLURM_STEP_TASKS_PER_NODE"])
    node = read_number(environ, "SLURM_NODEID")
    if len(hosts) != len(counts) or node >= len(hosts):
        raise LaunchError(
            f"SLURM_STEP_NODELIST={shorten(environ['SLURM_STEP_NODELIST'])} names {len(hosts)} nodes, "
            f"SLURM_STEP_TASKS_PER_NODE={shorten(environ['SLURM_STEP_TASKS_PER_NODE'])} speaks of {len(counts)} "
            f"nodes, and SLURM_NODEID is {node}. One of them was changed by hand: leave them to srun."
        )
    return SlurmStep(
        job=read_number(environ, "SLURM_JOB_ID"),
        number=read_number(environ, "SLURM_STEP_ID"),
        host=hosts[node],
        hosts=tuple(hosts),
        ranks_per_node=tuple(counts),
        cpus_per_task=_cpus_per_task(environ, counts[node]),
        gpu_ids=visible_gpus(environ),
        array=_array(environ),
        scattered=environ.get("SLURM_DISTRIBUTION", "").startswith("arbitrary"),
    )


def slurm_step_id(environ: Mapping[str, str]) -> str | None:
    """Return the `JOB.STEP` whose tasks are this job's ranks; None if srun did not start them."""
    launcher = find_launcher(environ)
    if launcher is None or launcher.name != "srun" or not {"SLURM_JOB_ID", "SLURM_STEP_ID"} <= environ.keys():
        return None
    return f"{environ['SLURM_JOB_ID']}.{environ['SLURM_STEP_ID']}"


@dataclass(frozen=True)
class SlurmJob:
    """The Slurm job that this process runs in."""

    job_id: str | None
    """as Slurm's commands take it, one array task if it is one; None outside of Slurm"""
    step_id: str
    restart_count: int
    """how often it was requeued"""


def slurm_job(environ: Mapping[str, str]) -> SlurmJob:
    """Return the Slurm job that this process runs in."""
    count = environ.get("SLURM_RESTART_COUNT", "")
    job_id, step_id = environ.get("SLURM_JOB_ID"), environ.get("SLURM_STEP_ID", "")
    # One task of an array has the array's own number as its job ID, which Slurm's commands take for all its tasks.
    # A job with another ID is another task, or was submitted by one and has inherited the array's variables.
    if job_id is not None and job_id == environ.get("SLURM_ARRAY_JOB_ID") and "SLURM_ARRAY_TASK_ID" in environ:
        job_id = f"{job_id}_{environ['SLURM_ARRAY_TASK_ID']}"
    return SlurmJob(job_id, step_id, int(count) if count.isdecimal() else 0)


def _cpus_per_task(environ: Mapping[str, str], tasks: int) -> int | None:
    # SLURM_CPUS_PER_TASK may be left from sbatch, which srun does not follow from Slurm 22.05 on.
    if "SLURM_CPUS_ON_NODE" not in environ:
        return None
    return max(1, read_number(environ, "SLURM_CPUS_ON_NODE") // max(1, tasks))


def _array(environ: Mapping[str, str]) -> tuple[int, int] | None:
    names = "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"
    if not set(names) <= environ.keys():
        return None
    return read_number(environ, names[0]), read_number(environ, names[1])


def visible_gpus(environ: Mapping[str, str]) -> tuple[str, ...] | None:
    """Return the GPUs that the environment lets this process see, by number or name; None if it hides none.

    As in CUDA, the list ends at the first entry that is no GPU's name: `-1` and `NoDevFiles` mean no GPU at all.
    """
    text = next((environ[name] for name in GPU_VARIABLES if name in environ), None)
    if text is None:
        return None
    names = (name.strip() for name in text.split(","))
    return tuple(takewhile(re.compile(r"[0-9]+|(GPU|MIG)-[0-9A-Za-z/-]+").fullmatch, names))


def expand_counts(text: str) -> list[int]:
    """Expand Slurm's tasks per node: `"4(x2),2"` means 4, 4 and 2.

    Raises:
        LaunchError: the text is not such a list.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", part)
        if match is None:
            raise LaunchError(f"SLURM_STEP_TASKS_PER_NODE should look like 4(x2),2 but is {shorten(text)}.")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def expand_hosts(text: str) -> list[str]:
    """Expand Slurm's list of hosts: `"gpu[03-05,9],login"` means gpu03, gpu04, gpu05, gpu9 and login.

    A name may have several brackets, of which the last one counts fastest. `scontrol show hostnames` is not
    called: thousands of ranks that start at once would overload Slurm's controller.

    Raises:
        LaunchError: the text is not such a list.
    """
    names = re.findall(r"(?:[^,\[\]\s]|\[[0-9,-]+\])+", text)
    if not names or ",".join(names) != text:
        raise _malformed(text)
    hosts: list[str] = []
    for name in names:
        # Every second piece was in brackets.
        pieces = re.split(r"[\[\]]", name)
        choices = [_numbers(piece, text) if i % 2 else [piece] for i, piece in enumerate(pieces)]
        if len(hosts) + prod(map(len, choices)) > MAX_HOSTS:
            raise _malformed(text)
        hosts += map("".join, product(*choices))
    return hosts


def _numbers(ranges: str, text: str) -> list[str]:
    """Expand `"03-05,9"` to 03, 04, 05 and 9: all numbers of a range are padded to the width of its first."""
    numbers: list[str] = []
    for part in ranges.split(","):
        match = re.fullmatch(r"([0-9]{1,18})(?:-([0-9]{1,18}))?", part)
        if match is None:
            raise _malformed(text)
        first, last = int(match[1]), int(match[2] or match[1])
        if not 0 <= last - first < MAX_HOSTS:
            raise _malformed(text)
        numbers += [f"{i:0{len(match[1])}}" for i in range(first, last + 1)]
    return numbers


def _malformed(text: str) -> LaunchError:
    return LaunchError(f"SLURM_STEP_NODELIST should look like gpu[03-05,9],login but is {shorten(text)}.")
