"""The table of launchers: for each, the names of the environment variables that it sets.

`find_launcher` takes the first row that matches. The most specific launcher comes first and the scheduler last,
because processes that mpirun or torchrun start inside a Slurm allocation see Slurm's variables too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, fields, replace

from hvd_trainer.errors import LaunchError


@dataclass(frozen=True)
class Launcher:
    """One launcher: the names of its variables. An empty name: it sets no such variable.

    A local rank or size that is not set is found when the ranks meet.
    """

    name: str
    rank: str
    size: str
    local_rank: str = ""
    local_size: str = ""
    node_rank: str = ""
    num_nodes: str = ""
    host: str = ""
    """the node's name; optional, since some versions do not set it"""
    group: str = ""
    """number of the launcher's own process on the node: one machine may have several, which count as nodes"""
    markers: tuple[str, ...] = ()
    """variables that only this launcher sets, where others set the rank variables too: one of them is enough"""
    port: str = ""
    """the port at which its ranks meet: two of its jobs differ in it if in nothing else"""
    optional: tuple[str, ...] = ()
    """variables that some of those who set the others leave out"""
    job: tuple[str, ...] = ()
    """variables that together tell its jobs apart on a node; some may not be set"""

    def variables(self) -> tuple[str, ...]:
        """Return the names that tell a rank its place."""
        others = ("name", "host", "group", "markers", "port", "optional", "job")
        names = (getattr(self, f.name) for f in fields(self) if f.name not in others)
        return tuple(name for name in names if name)

    @property
    def tells_place(self) -> bool:
        """Whether each of its ranks is told its place on its node."""
        return bool(self.local_rank and self.local_size) and not self.optional

    def missing(self, environ: Mapping[str, str]) -> list[str]:
        """Return the variables that must be set, and are not."""
        return [name for name in self.variables() if name not in environ and name not in self.optional]

    def traces(self) -> set[str]:
        """Return the variables in which a process of another job, or of another rank, differs."""
        return {*self.variables(), *self.markers, self.port} - {""}

    def evidence(self, environ: Mapping[str, str]) -> list[str]:
        """Return the variables in the environment that show that this launcher started the process."""
        return [name for name in self.markers or self.variables() if name in environ]


NUMBER = "[0-9]{1,10}"
"""int() would also take "1_0", "+1" and other alphabets' digits, which no launcher writes."""
HYDRA_NAMES = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
TORCH_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def _four(prefix: str) -> tuple[str, str, str, str]:
    """Return the names of rank and size, and of both on the node."""
    return f"{prefix}_RANK", f"{prefix}_SIZE", f"{prefix}_LOCAL_RANK", f"{prefix}_LOCAL_SIZE"


HAND = Launcher("hand", *TORCH_NAMES, port="MASTER_PORT", optional=TORCH_NAMES[2:])
"""Whoever sets what `init_process_group("env://")` asks for: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."""
# WORLD_SIZE alone is a marker only where nobody else has started the process: batch scripts often set it for all
# tasks, whatever starts them.
BY_HAND = replace(HAND, markers=("RANK", "LOCAL_RANK")), HAND
LAUNCHERS = (
    Launcher("run", "HVD_TRAINER_RANK", "HVD_TRAINER_SIZE", "HVD_TRAINER_LOCAL_RANK", "HVD_TRAINER_LOCAL_SIZE"),
    Launcher(
        "horovodrun",
        *_four("HOROVOD"),
        host="HOROVOD_HOSTNAME",
        job=("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"),
    ),
    Launcher(
        "torchrun",
        *TORCH_NAMES,
        group="GROUP_RANK",
        markers=("TORCHELASTIC_RUN_ID",),
        port="MASTER_PORT",
        job=("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"),
    ),
    BY_HAND[0],
    # IBM's launcher sets those of Open MPI, too.
    Launcher("jsrun", *_four("JSM_NAMESPACE"), optional=("JSM_NAMESPACE_LOCAL_SIZE",), job=("PMIX_NAMESPACE",)),
    Launcher("mpirun", *_four("OMPI_COMM_WORLD"), job=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")),
    Launcher("mpirun_rsh", *_four("MV2_COMM_WORLD"), job=("MPIRUN_ID", "PMI_PORT")),
    Launcher("mpiexec", *HYDRA_NAMES, markers=("MPI_LOCALRANKID", "MPI_LOCALNRANKS")),
    # It runs below srun, too, and sets PMI_RANK beside its own.
    Launcher(
        "flux",
        *("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID"),
        num_nodes="FLUX_JOB_NNODES",
        job=("FLUX_JOB_ID",),
    ),
    Launcher(
        "srun",
        *("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
        *("SLURM_NODEID", "SLURM_STEP_NUM_NODES"),
        host="SLURMD_NODENAME",
        # SLURM_PROCID and the others are set in every batch script too, where plain python runs as one process.
        markers=("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NUM_NODES"),
        job=("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
    ),
    # The mpiexec of HPE's Cray systems. srun may set such variables, too.
    Launcher("PALS", *_four("PMI"), markers=("PMI_LOCAL_RANK", "PALS_RANKID"), job=("PALS_APID",)),
    # Without srun, PMI_RANK alone means a rank whose local rank is missing: an error.
    Launcher("mpiexec", *HYDRA_NAMES),
    # prterun without Open MPI's personality tells a rank no size: an error.
    Launcher("mpirun", *_four("OMPI_COMM_WORLD"), markers=("PMIX_RANK",)),
    BY_HAND[1],
)


CHOICE = "HVD_TRAINER_LAUNCHER"
"""Variable with the name of the launcher, for processes that are given the variables of torchrun and horovodrun
beside those of the launcher that started them; and with all these variables as they were then."""


def find_launcher(environ: Mapping[str, str]) -> Launcher | None:
    """Return the launcher whose variables are set, some or all of them; None if none started this process."""
    name = json.loads(environ[CHOICE])[0] if CHOICE in environ else None
    if name == "python":
        return None
    rows = [launcher for launcher in LAUNCHERS if name in (None, launcher.name)]
    return next((launcher for launcher in rows if launcher.evidence(environ)), None)


def choose_launcher(environ: MutableMapping[str, str], name: str) -> None:
    """Let a process count as started by this launcher, whatever variables of others it has been given."""
    traces = set().union(*(launcher.traces() for launcher in LAUNCHERS))
    environ[CHOICE] = json.dumps([name, {trace: environ[trace] for trace in sorted(traces & environ.keys())}])


def forget_outer_launchers(environ: MutableMapping[str, str]) -> None:
    """Remove rank variables of a process of `choose_launcher`, if a launcher below that has started this process.

    They belong to that process, and all below inherit them. The nearest launcher is the one whose variables have
    changed since.
    """
    if CHOICE not in environ:
        return
    before = json.loads(environ[CHOICE])[1]
    outer = {CHOICE}
    for launcher in LAUNCHERS:
        names = launcher.traces()
        if launcher.evidence(environ) and any(environ.get(name) != before.get(name) for name in names):
            for name in outer - names:
                environ.pop(name, None)
            return
        outer |= names


def without_ranks(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the variables by which launchers tell processes their ranks."""
    names = {CHOICE, *(name for launcher in LAUNCHERS for name in launcher.variables())}
    return {name: value for name, value in environ.items() if name not in names}


def forget_ranks(environ: MutableMapping[str, str]) -> None:
    """Let a process be no rank, whatever variables it has inherited."""
    for name in environ.keys() - without_ranks(environ).keys():
        del environ[name]
    choose_launcher(environ, "python")


def require_variables(environ: Mapping[str, str], launcher: str, *names: str) -> None:
    """Check that a launcher has set the variables by which its ranks find each other.

    Raises:
        LaunchError: it has not.
    """
    if missing := [name for name in names if not environ.get(name)]:
        raise LaunchError(
            f"{launcher} should set {', '.join(missing)} and has not, so the ranks cannot find each other. Were "
            f"its other variables set by hand? Set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT instead."
        )


def read_number(environ: Mapping[str, str], name: str) -> int:
    """Return the whole number in a variable.

    Raises:
        LaunchError: it contains something else.
    """
    if not re.fullmatch(NUMBER, environ[name]):
        raise LaunchError(
            f"{name} should be a whole number, but is {shorten(environ[name])}. Leave it to the launcher, or "
            f"type: export {name}=NUMBER"
        )
    return int(environ[name])


def shorten(text: str) -> str:
    """Return a text as an error shows it: quoted, and at most a line of it."""
    return repr(text if len(text) <= 60 else text[:60] + "...")
