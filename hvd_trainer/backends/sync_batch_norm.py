"""Batch norm over the global batch: one implementation for both engines, on CPUs and GPUs.

PyTorch's and Horovod's own SyncBatchNorm refuse CPU tensors and differ from each other in rounding. Here one
collective carries each rank's mean, variance and count, which are combined by the formula of Chan, Golub and
LeVeque (1979), "Updating formulae and a pairwise algorithm for computing sample variances".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from hvd_trainer.errors import BackendError

if TYPE_CHECKING:
    from hvd_trainer.backends.base import Backend

# The base class of BatchNorm1d, 2d and 3d: the only way to recognise all of them.
BatchNorm = nn.modules.batchnorm._BatchNorm


class _SumOverRanks(Function):
    """Sum over ranks; since each rank's output depends on all inputs, so does the gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, backend: Backend) -> Tensor:
        ctx.backend = backend
        return backend.all_reduce(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.backend.all_reduce(grads[0].contiguous()), None


class SyncBatchNorm(BatchNorm):
    """Batch norm of (N, C, ...) inputs over all ranks' N, with BatchNorm's parameters and state names."""

    backend: Backend

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected an input of at least 2 dimensions, got {input.dim()}")

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        if not self.training:
            return super().forward(input)
        mean, var, count = self._global_statistics(input)
        if self.track_running_stats:
            self._track(mean.detach(), var.detach() * (count / (count - 1).clamp(min=1)))
        shape = (1, -1) + (1,) * (input.dim() - 2)
        out = (input - mean.to(input.dtype).view(shape)) * ((var + self.eps).rsqrt().to(input.dtype).view(shape))
        if self.affine:
            out = out * self.weight.view(shape) + self.bias.view(shape)
        return out

    def _global_statistics(self, input: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        world = self.backend.world
        dims = [0, *range(2, input.dim())]
        local_var, local_mean = torch.var_mean(input.float(), dims, correction=0)
        count = local_mean.new_full((1,), input.numel() / input.shape[1])
        row = torch.cat([local_mean, local_var, count])
        # One row per rank, zero but for this rank's: their sum is a gather that autograd can follow.
        rows = _SumOverRanks.apply(
            torch.nn.functional.pad(row[None], (0, 0, world.rank, world.size - world.rank - 1)), self.backend
        )
        means, variances, counts = rows.split([input.shape[1], input.shape[1], 1], dim=1)
        weights = counts / counts.sum()
        mean = (weights * means).sum(0)
        var = (weights * (variances + (means - mean) ** 2)).sum(0)
        return mean, var, counts.detach().sum()

    @torch.no_grad()
    def _track(self, mean: Tensor, unbiased_var: Tensor) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked += 1
        momentum = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(unbiased_var.to(self.running_var.dtype), momentum)


def convert_sync_batch_norm(model: nn.Module, backend: Backend) -> None:
    """Replaces every batch norm inside `model`, in place; parameters and buffers stay the same objects.

    Raises:
        BackendError: the model itself is a batch norm, so that there is nothing to put the new one into.
    """
    if isinstance(model, BatchNorm):
        raise BackendError("--sync-batch-norm: the model is itself a batch norm; put it into nn.Sequential.")
    if backend.world.size == 1:
        return
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, BatchNorm):
                new = SyncBatchNorm(
                    child.num_features, child.eps, child.momentum, child.affine, child.track_running_stats
                )
                new.backend = backend
                # Parameters, buffers and the training flag: the optimizer goes on with the same tensors.
                new._parameters, new._buffers = child._parameters, child._buffers
                new.train(child.training)
                setattr(parent, name, new)
