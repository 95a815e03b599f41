"""Describe a build by its choices, and by the name under which its wheel is kept."""

from __future__ import annotations

import os
import platform
import sysconfig
from dataclasses import dataclass

from hvd_trainer.horovod_build.facts import Nccl, TorchFacts
from hvd_trainer.horovod_build.patch_set import PATCH_SET
from hvd_trainer.horovod_build.toolchain import CudaToolkit, cpu_flags

VERSION = "0.28.1"
MEMORY_PER_JOB_GB = 2


@dataclass(frozen=True)
class BuildPlan:
    """The PyTorch to build for, and the compilers and libraries to build with."""

    torch: TorchFacts
    cuda: CudaToolkit | None
    nccl: Nccl | None
    mpi: str | None
    jobs: int

    @property
    def record(self) -> dict[str, object]:
        """Everything that the built wheel depends on."""
        return {
            "horovod": VERSION,
            "patch_set": PATCH_SET,
            "torch": self.torch.version,
            "python": python_tag(),
            "machine": "_".join([platform.machine(), *cpu_flags()]),
            "cuda": self.cuda.version if self.cuda else None,
            "nccl": self.nccl.version if self.nccl else None,
            "mpi": self.mpi,
        }

    @property
    def name(self) -> str:
        """The name of the wheel's folder in the wheel dir, which has all of the record."""
        record = self.record
        gpu = f"cuda{record['cuda']}-nccl{record['nccl']}" if record["cuda"] else "cpu"
        mpi = f"-mpi{record['mpi']}" if record["mpi"] else ""
        horovod = f"horovod{record['horovod']}-p{record['patch_set']}"
        return f"{horovod}-torch{record['torch']}-{record['python']}-{record['machine']}-{gpu}{mpi}"


def python_tag() -> str:
    """Return the interpreter's ABI: cpython-311, cpython-313t, ..."""
    return "-".join(str(sysconfig.get_config_var("SOABI")).split("-")[:2])


def default_jobs() -> int:
    """Return the number of compilers for which there are cores and memory."""
    memory = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return max(1, min(len(os.sched_getaffinity(0)), int(memory / MEMORY_PER_JOB_GB)))
