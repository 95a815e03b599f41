"""The table of launchers: one row of variable names for each.

The most specific launcher comes first and the scheduler last, because processes that mpirun or torchrun start
inside a Slurm allocation see Slurm's variables too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Launcher:
    """One launcher: the names of its variables. An empty name: it does not tell."""

    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str
    node_rank: str = ""
    num_nodes: str = ""
    host: str = ""
    """The node's name; not every version sets it, so it may be missing."""
    group: str = ""
    """The number of the launcher's own process on the node: there may be several on one machine, to try it out."""
    markers: tuple[str, ...] = ()
    """What only this launcher sets: any of them shows it, where others set the rank variables too."""

    def variables(self) -> tuple[str, ...]:
        """The names that must all be set."""
        names = (getattr(self, f.name) for f in fields(self) if f.name not in ("name", "host", "group", "markers"))
        return tuple(name for name in names if name)

    def signs(self, environ: Mapping[str, str]) -> list[str]:
        """The variables that are set and show that this launcher started the process."""
        return [name for name in self.markers or self.variables() if name in environ]


HYDRA_NAMES = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")


TORCH_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


LAUNCHERS = (
    Launcher("run", "HVD_TRAINER_RANK", "HVD_TRAINER_SIZE", "HVD_TRAINER_LOCAL_RANK", "HVD_TRAINER_LOCAL_SIZE"),
    Launcher(
        "horovodrun",
        "HOROVOD_RANK",
        "HOROVOD_SIZE",
        "HOROVOD_LOCAL_RANK",
        "HOROVOD_LOCAL_SIZE",
        host="HOROVOD_HOSTNAME",
    ),
    Launcher("torchrun", *TORCH_NAMES, group="GROUP_RANK", markers=("TORCHELASTIC_RUN_ID",)),
    # Batch scripts often set WORLD_SIZE for all tasks; it is no sign of who starts them.
    Launcher("hand", *TORCH_NAMES, markers=("RANK", "LOCAL_RANK")),
    Launcher(
        "mpirun",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    Launcher("mpiexec", *HYDRA_NAMES, markers=("MPI_LOCALRANKID", "MPI_LOCALNRANKS")),
    Launcher(
        "srun",
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_LOCALID",
        "SLURM_STEP_TASKS_PER_NODE",
        "SLURM_NODEID",
        "SLURM_STEP_NUM_NODES",
        host="SLURMD_NODENAME",
        # The others are in every batch script too, where plain python runs as one process.
        markers=("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NUM_NODES"),
    ),
    # Without srun (which may set PMI_RANK too) a lone PMI_RANK is a rank that does not know its node.
    Launcher("mpiexec", *HYDRA_NAMES),
    Launcher("hand", *TORCH_NAMES),
)
