"""Describe a build by its choices, and by the key under which its wheel is kept."""

from __future__ import annotations

import os
import platform
import sysconfig
from dataclasses import asdict, dataclass

from hvd_trainer.horovod_build.facts import TorchFacts
from hvd_trainer.horovod_build.nccl import Nccl
from hvd_trainer.horovod_build.patch_set import PATCH_SET
from hvd_trainer.horovod_build.toolchain import CudaToolkit, cpu_flags

VERSION = "0.28.1"
MEMORY_PER_JOB_GB = 2


@dataclass(frozen=True)
class BuildKey:
    """Everything that a built wheel depends on; `name` is its folder in the wheel dir."""

    horovod: str
    patch_set: int
    torch: str
    python: str
    machine: str
    cuda: str | None
    nccl: str | None
    mpi: str | None

    @property
    def name(self) -> str:
        parts = [
            f"horovod{self.horovod}-p{self.patch_set}",
            f"torch{self.torch}",
            self.python,
            self.machine,
        ]
        parts.append(f"cuda{self.cuda}-nccl{self.nccl}" if self.cuda else "cpu")
        parts.extend([f"mpi{self.mpi}"] if self.mpi else [])
        return "-".join(parts)

    def record(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True)
class BuildPlan:
    """The PyTorch to build for, and the compilers and libraries to build with."""

    torch: TorchFacts
    cuda: CudaToolkit | None
    nccl: Nccl | None
    mpi: str | None
    jobs: int

    @property
    def key(self) -> BuildKey:
        return BuildKey(
            horovod=VERSION,
            patch_set=PATCH_SET,
            torch=self.torch.version,
            python=python_tag(),
            machine="_".join([platform.machine(), *cpu_flags()]),
            cuda=self.cuda.version if self.cuda else None,
            nccl=self.nccl.version if self.nccl else None,
            mpi=self.mpi,
        )


def python_tag() -> str:
    """Return the interpreter's ABI: cpython-311, cpython-313t, ..."""
    return str(sysconfig.get_config_var("SOABI")).split("-x86")[0].split("-aarch")[0]


def default_jobs() -> int:
    """Return the number of compilers for which there are cores and memory."""
    memory = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return max(1, min(len(os.sched_getaffinity(0)), int(memory / MEMORY_PER_JOB_GB)))
