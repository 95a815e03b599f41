"""Slurm's variables: the job, and the step of this process with the address at which its ranks meet.

A step is what one srun started. It may have fewer tasks and nodes than its job, and the environment has the
numbers of both: what differs is read from the step's own variables.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile

from hvd_trainer.errors import LaunchError
from hvd_trainer.launch.launchers import find_launcher, read_number, require_variables, shorten

FIRST_PORT, NUM_PORTS = 20_000, 12_000
"""Below Linux's ephemeral ports, which begin at 32768."""
STEPS_PER_JOB = 61
"""Distance between the ports of one job and of the next: so many steps of a job have ports of their own."""
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
    master_address: str
    """the name of the step's first node, where rank 0 runs"""

    @property
    def master_port(self) -> int:
        """The port at which rank 0 listens; all ranks compute the same one.

        The ports of two steps differ if their jobs' numbers are less than 196 apart and both are among the first
        61 steps of their jobs.
        """
        return FIRST_PORT + (self.job * STEPS_PER_JOB + self.number) % NUM_PORTS


def detect_slurm(environ: Mapping[str, str]) -> SlurmStep | None:
    """Return the Slurm step that srun started this process in.

    Returns:
        None if there is no step: outside of Slurm, and in a batch script that has not called srun.

    Raises:
        LaunchError: some of Slurm's variables are missing or malformed, or do not tell where rank 0 is.
    """
    return read_step(environ) if "SLURM_STEP_ID" in environ else None


def read_step(environ: Mapping[str, str]) -> SlurmStep:
    """Return the step of a process that srun started.

    Raises:
        LaunchError: as `detect_slurm`.
    """
    require_variables(environ, "srun", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEP_NODELIST")
    if environ.get("SLURM_DISTRIBUTION", "").startswith("arbitrary"):
        raise LaunchError(
            f"srun --distribution=arbitrary does not tell on which of {environ['SLURM_STEP_NODELIST']} rank 0 is. "
            f"Type before srun: export MASTER_ADDR=HOST_OF_RANK_0 MASTER_PORT=29500"
        )
    return SlurmStep(
        job=read_number(environ, "SLURM_JOB_ID"),
        number=read_number(environ, "SLURM_STEP_ID"),
        master_address=first_host(environ["SLURM_STEP_NODELIST"]),
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


def first_host(text: str) -> str:
    """Return the first of Slurm's list of hosts: `"gpu[03-05,9],login"` begins with gpu03.

    A name may have several brackets. `scontrol show hostnames` is not called: a container has none.

    Raises:
        LaunchError: the text is not such a list.
    """
    match = re.match(r"((?:[^,\[\]\s]|\[[0-9]{1,18}(?:[-,][0-9,-]*)?\])+)(?:,|$)", text)
    if match is None:
        raise LaunchError(f"SLURM_STEP_NODELIST should look like gpu[03-05,9],login but is {shorten(text)}.")
    return re.sub(r"\[([0-9]+)[^]]*\]", r"\1", match[1])
