"""`horovod.torch.mpi_ops`: all operations, and this process's place among the ranks."""

from __future__ import annotations

import torch

from hvd_trainer.hvd.common import basics
from hvd_trainer.hvd.common.basics import (
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    size,
    start_timeline,
    stop_timeline,
)
from hvd_trainer.hvd.common.exceptions import HorovodInternalError
from hvd_trainer.hvd.common.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    init,
    remove_process_set,
)
from hvd_trainer.hvd.common.request import ADASUM, AVERAGE, BARRIER, MAX, MIN, PRODUCT, SUM
from hvd_trainer.hvd.operations.allgather import (
    allgather,
    allgather_async,
    grouped_allgather,
    grouped_allgather_async,
)
from hvd_trainer.hvd.operations.allreduce import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    handle_average_backwards_compatibility,
    sparse_allreduce_async,
)
from hvd_trainer.hvd.operations.alltoall import alltoall, alltoall_async
from hvd_trainer.hvd.operations.broadcast import broadcast, broadcast_, broadcast_async, broadcast_async_
from hvd_trainer.hvd.operations.handles import handles, poll, submit, synchronize
from hvd_trainer.hvd.operations.reducescatter import (
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)
from hvd_trainer.utils import accelerator

Average, Sum, Adasum, Min, Max, Product = AVERAGE, SUM, ADASUM, MIN, MAX, PRODUCT

__all__ = [
    "Adasum",
    "Average",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "handle_average_backwards_compatibility",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]


def shutdown() -> None:
    """End the job: waits until all ranks come to it, too; nothing if there is none."""
    basics.shutdown()
    handles.clear()


def join(device: int = -1) -> int:
    """Take part in the other ranks' allreduces with zeros until all ranks have joined: for uneven data.

    Args:
        device: number of the GPU for the zeros; -1: the CPU.

    Returns:
        The rank that joined last.

    Raises:
        HorovodInternalError: not initialised, or the job has ended.
    """
    kind = accelerator.kind() if device >= 0 else None
    zeros_on = torch.device("cpu") if kind is None else torch.device(kind, device)
    return basics.controller(0).join(zeros_on)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks of a process set have called it.

    Raises:
        HorovodInternalError: not initialised, or the job has ended.
    """
    submit(BARRIER, (), None, process_set, will_wait=True).result()
