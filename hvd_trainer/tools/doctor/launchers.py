"""Check what starts ranks: variables left in this shell, and Slurm."""

from __future__ import annotations

from contextlib import suppress

from hvd_trainer.errors import LaunchError, first_line
from hvd_trainer.launch.launchers import find_launcher
from hvd_trainer.launch.slurm import detect_slurm, slurm_job
from hvd_trainer.launch.world import detect
from hvd_trainer.tools.doctor.context import Context
from hvd_trainer.tools.doctor.findings import Finding, error, ok, warning

TASK = ("srun", "--overlap", "--mpi=none", "--ntasks=1", "--nodes=1", "true")


def check_variables(context: Context) -> list[Finding]:
    """Check whether the shell has variables by which a process takes itself for a rank."""
    environ = context.environ
    launcher = find_launcher(environ)
    if launcher is None:
        return [ok("launcher", "no rank variables are left over in this shell")]
    try:
        world = detect(environ)
        detect_slurm(environ)
    except LaunchError as wrong:
        names = [name for name in dict.fromkeys((*launcher.markers, *launcher.variables())) if name in environ]
        missing = [name for name in launcher.variables() if name not in environ]
        are = "are" if len(missing) > 1 else "is"
        half = f"{', '.join(names)} set, but {', '.join(missing)} {are} not: no job would start in this shell"
        return [error("launcher", half if missing else first_line(wrong), f"unset {' '.join(names)}")]
    return [ok("launcher", f"this is {world}, started by {launcher.name}")]


def check_slurm(context: Context) -> list[Finding]:
    """Check, inside of a job, that srun starts a task."""
    job = slurm_job(context.environ).job_id
    if job is None:
        return [ok("Slurm", "outside of a job")]
    srun = context.programs.find("srun")
    if srun is None:
        found = f"inside of job {job}, and there is no srun on PATH"
        return [error("Slurm", found, "module load slurm    (or use the PATH of the node that you came from)")]
    answer = context.programs.ask(srun, *TASK[1:])
    if answer.code != 0:
        found = f"inside of job {job}, srun starts no task: {answer.last_line}"
        return [error("Slurm", found, f"{' '.join(TASK)}    (or ask scontrol ping)")]
    return [ok("Slurm", f"inside of job {job}; srun starts tasks")]


def check_visible_gpus(context: Context) -> list[Finding]:
    """Warn in a Slurm step if this rank sees one GPU and shares its node with others; else return nothing."""
    ranks = 1
    with suppress(LaunchError):  # "launcher" says what is wrong
        if (world := detect(context.environ)).launcher == "srun":
            ranks = world.local_size
    if ranks < 2 or len(context.facts.torch.gpus) != 1:
        return []
    found = (
        f"{ranks} ranks on this node, and this one sees 1 GPU, as with --gpus-per-task=1: where control groups "
        f"hide the others, NCCL goes through host memory, or fails with 'invalid argument'"
    )
    remedy = f"srun --ntasks-per-node={ranks} --gres=gpu:{ranks} --gpu-bind=none    (each rank takes its own GPU)"
    return [warning("visible GPUs", found, remedy)]
