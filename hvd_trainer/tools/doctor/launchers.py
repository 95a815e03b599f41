"""Check what starts ranks: variables left in this shell, MPI, Slurm."""

from __future__ import annotations

import importlib.util
import os
import re
from contextlib import suppress

from hvd_trainer.errors import LaunchError, first_line
from hvd_trainer.launch.launchers import find_launcher
from hvd_trainer.launch.slurm import detect_slurm, slurm_job
from hvd_trainer.launch.world import detect
from hvd_trainer.tools.doctor.context import Context
from hvd_trainer.tools.doctor.findings import Finding, error, ok, warning

SRUN_TIMEOUT_S = 5.0


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
        missing = launcher.missing(environ)
        are = "are" if len(missing) > 1 else "is"
        half = f"{', '.join(names)} set, but {', '.join(missing)} {are} not: no job would start in this shell"
        return [error("launcher", half if missing else first_line(wrong), f"unset {' '.join(names)}")]
    return [ok("launcher", f"this is {world}, started by {launcher.name}")]


def check_mpi(context: Context) -> list[Finding]:
    """Check that mpirun runs, if it is installed: only some launches need it."""
    mpirun = context.programs.find("mpirun")
    if mpirun is None:
        return [ok("MPI", "no mpirun: not needed, horovodrun and torchrun do without")]
    answer = context.programs.ask(mpirun, "--version")
    if answer.code != 0:
        remedy = "mpirun --version    (if you need it: horovodrun and torchrun do without)"
        return [warning("MPI", f"{mpirun} does not run: {answer.last_line}", remedy)]
    hydra = re.search(r"^\s*Version:\s+(\S+)", answer.out, re.MULTILINE) if "HYDRA" in answer.out else None
    first = re.sub(r"^mpirun \((.+)\) ", r"\1 ", next(iter(answer.out.strip().splitlines()), "of unknown version"))
    texts = [f"MPICH {hydra[1]}" if hydra else first]
    if os.geteuid() == 0 and "Open MPI" in texts[0]:
        texts.append("as root it wants --allow-run-as-root")
    if context.several_hosts and importlib.util.find_spec("mpi4py") is None:
        texts.append("without mpi4py several hosts want -x MASTER_ADDR=HOST_OF_RANK_0 -x MASTER_PORT=29500")
    return [ok("MPI", "; ".join(texts))]


def check_slurm(context: Context) -> list[Finding]:
    """Check srun; inside of a job, that it starts a task."""
    programs, job = context.programs, slurm_job(context.environ).job_id
    srun = programs.find("srun")
    if srun is None:
        if job is not None:
            text = f"inside of job {job}, and there is no srun on PATH"
            return [error("Slurm", text, "module load slurm    (or use the PATH of the node that you came from)")]
        return [ok("Slurm", "no srun: not needed outside of a cluster")]
    version = programs.ask(srun, "--version", limit_s=SRUN_TIMEOUT_S)
    if version.code != 0 and job is None:
        text = f"not needed: srun is installed, but this machine is in no cluster ({version.last_line})"
        return [ok("Slurm", text)]
    if version.code != 0:
        return [error("Slurm", f"inside of job {job}, srun says: {version.last_line}", "scontrol ping")]
    release = version.out.strip().replace("slurm-wlm", "slurm").removeprefix("slurm ")
    if job is not None:
        task, place = (
            ("--overlap", "--mpi=none", "--ntasks=1", "--nodes=1", "true"),
            f"{release}, inside of job {job}",
        )
        answer = programs.ask(srun, *task, limit_s=SRUN_TIMEOUT_S)
        if answer.code != 0:
            text = f"{place}; srun starts no task: {answer.last_line}"
            return [error("Slurm", text, " ".join(["srun", *task]))]
        return [ok("Slurm", f"{place}; srun starts tasks")]
    return [ok("Slurm", f"{release}, outside of a job")]


def check_visible_gpus(context: Context) -> list[Finding]:
    """Warn in a Slurm step if this rank sees one GPU and shares its node with others; else return nothing."""
    ranks = 1
    with suppress(LaunchError):  # "launcher" says what is wrong
        if (world := detect(context.environ)).launcher == "srun":
            ranks = world.local_size
    if ranks < 2 or len(context.facts.torch.gpus) != 1:
        return []
    text = (
        f"{ranks} ranks on this node, and this one sees 1 GPU, as with --gpus-per-task=1: where control groups "
        f"hide the others, NCCL goes through host memory, or fails with 'invalid argument'"
    )
    remedy = f"srun --ntasks-per-node={ranks} --gres=gpu:{ranks} --gpu-bind=none    (each rank takes its own GPU)"
    return [warning("visible GPUs", text, remedy)]
