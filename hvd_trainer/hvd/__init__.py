"""Horovod's API for PyTorch, as `import horovod.torch as hvd` has it, on torch.distributed.

    from hvd_trainer import hvd

No Horovod and no compiler: CPU tensors travel by Gloo, GPU tensors by the GPU's library. Started by any launcher.
"""

from __future__ import annotations

from hvd_trainer.hvd import elastic, mpi_ops
from hvd_trainer.hvd.compression import Compression
from hvd_trainer.hvd.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from hvd_trainer.hvd.mpi_ops import *  # noqa: F403
from hvd_trainer.hvd.optimizer import DistributedOptimizer
from hvd_trainer.hvd.sync_batch_norm import SyncBatchNorm

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "SyncBatchNorm",
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "elastic",
    *mpi_ops.__all__,
]
