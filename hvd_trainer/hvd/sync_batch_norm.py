"""Batch norm over all ranks' samples."""

from __future__ import annotations

from torch import Tensor

from hvd_trainer.backends import sync_batch_norm
from hvd_trainer.hvd.common import basics
from hvd_trainer.hvd.mpi_ops import Sum, allreduce
from hvd_trainer.launch.world import World


class _Ranks:
    """The ranks that the statistics are taken over."""

    @property
    def world(self) -> World:
        return basics.runtime().world

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return allreduce(tensor, op=Sum)


class SyncBatchNorm(sync_batch_norm.SyncBatchNorm):
    """Batch norm of (N, C, ...) inputs over the samples of all ranks; takes CPU tensors, too.

    Args:
        num_features, eps, momentum, affine, track_running_stats: as in `torch.nn.BatchNorm1d`.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.collectives = _Ranks()
