"""Batch norm over the global batch, the same for both engines.

PyTorch's and Horovod's own SyncBatchNorm refuse CPU tensors and differ from each other in rounding. Here one
collective gathers each rank's mean, variance and count, which are combined by the formula of Chan, Golub and
LeVeque (1979), "Updating formulae and a pairwise algorithm for computing sample variances".

On accelerators five of PyTorch's kernels do that, each in place of several operations here; the CPU has none of
them. The collectives are the same.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import Function

from hvd_trainer.errors import BackendError
from hvd_trainer.launch.world import World
from hvd_trainer.utils import accelerator

# The base class of BatchNorm1d, 2d and 3d, by which all of them are recognised.
BatchNorm = nn.modules.batchnorm._BatchNorm


class RankSum(Protocol):
    """The collectives that batch norm needs, of an engine or of Horovod's API."""

    @property
    def world(self) -> World: ...

    def all_reduce(self, tensor: Tensor) -> Tensor: ...


class _SumOverRanks(Function):
    """Sum over ranks, forward and backward: each rank's output depends on all ranks' inputs."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, collectives: RankSum) -> Tensor:
        ctx.collectives = collectives
        return collectives.all_reduce(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.collectives.all_reduce(grads[0].contiguous()), None


class _FusedBatchNorm(Function):
    """Batch norm over all ranks by PyTorch's kernels for accelerators; also updates the running statistics."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None, layer: SyncBatchNorm, momentum: float
    ) -> Tensor:
        input = input.contiguous(memory_format=_memory_order(input))
        mean, invstd = torch.batch_norm_stats(input, layer.eps)
        rows = layer.gather(torch.cat([mean, invstd, mean.new_full((1,), _samples(input))]))
        means, invstds, counts = rows.split([len(mean), len(mean), 1], dim=1)
        # The kernel wants counts in the type of the running statistics, or of its first argument. fp16 ends at
        # 65,504, and bf16 has no 257: both are fp32 for it.
        tracked = (layer.running_mean, layer.running_var)
        running_mean, running_var = (None if buffer is None else buffer.to(mean.dtype) for buffer in tracked)
        mean, invstd = torch.batch_norm_gather_stats_with_counts(
            mean, means, invstds, running_mean, running_var, momentum, layer.eps, counts.flatten()
        )
        for buffer, value in zip(tracked, (running_mean, running_var), strict=True):
            if buffer is not None and value is not None:
                buffer.copy_(value)
        ctx.collectives = layer.collectives
        ctx.save_for_backward(input, weight, mean, invstd, counts.flatten().to(torch.int32))
        output: Tensor = torch.batch_norm_elemt(input, weight, bias, mean, invstd, layer.eps)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        input, weight, mean, invstd, counts = ctx.saved_tensors
        grad = grads[0].contiguous(memory_format=_memory_order(input))
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        sum_dy, sum_dy_xmu, grad_weight, grad_bias = torch.batch_norm_backward_reduce(
            grad, input, mean, invstd, weight, needs_input, needs_weight, needs_bias
        )
        grad_input = None
        if needs_input:
            sums = ctx.collectives.all_reduce(torch.cat([sum_dy, sum_dy_xmu]))
            sum_dy, sum_dy_xmu = sums.split(len(mean))
            scale = None if weight is None else weight.to(mean.dtype)
            grad_input = torch.batch_norm_backward_elemt(
                grad, input, mean, invstd, scale, sum_dy, sum_dy_xmu, counts
            )
        # The gradients of weight and bias are this rank's: the engine averages them like all others.
        return grad_input, grad_weight if needs_weight else None, grad_bias if needs_bias else None, None, None


def _memory_order(tensor: Tensor) -> torch.memory_format:
    """Return channels last if the tensor is laid out so, else contiguous: the kernels take no other order."""
    orders = (torch.channels_last, torch.channels_last_3d)
    return next((order for order in orders if tensor.is_contiguous(memory_format=order)), torch.contiguous_format)


def _samples(input: Tensor) -> int:
    """Return the number of values per channel."""
    return input.numel() // input.shape[1]


class SyncBatchNorm(BatchNorm):
    """Batch norm of (N, C, ...) inputs over all ranks' N, with BatchNorm's parameters and state names."""

    collectives: RankSum

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected an input of at least 2 dimensions, got {input.dim()}")

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        if not self.training:
            return super().forward(input)
        momentum = self._count_batch()
        if not accelerator.is_host(input.device):
            output: Tensor = _FusedBatchNorm.apply(input, self.weight, self.bias, self, momentum)
            return output
        # A mean near 100 in bf16 is wrong by up to 0.25: all is computed in fp32 at least, and the output rounded.
        values = input.to(torch.promote_types(input.dtype, torch.float32))
        mean, var, count = self._global_statistics(values)
        if self.track_running_stats:
            self._update_running_statistics(
                mean.detach(), var.detach() * (count / (count - 1).clamp(min=1)), momentum
            )
        shape = (1, -1) + (1,) * (input.dim() - 2)
        out = (values - mean.view(shape)) * (var + self.eps).rsqrt().view(shape)
        if self.weight is not None:
            out = out * self.weight.view(shape)
        if self.bias is not None:
            out = out + self.bias.view(shape)
        return out.to(input.dtype)

    def _global_statistics(self, input: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dims = [0, *range(2, input.dim())]
        local_var, local_mean = torch.var_mean(input, dims, correction=0)
        rows = self.gather(torch.cat([local_mean, local_var, local_mean.new_full((1,), _samples(input))]))
        means, variances, counts = rows.split([input.shape[1], input.shape[1], 1], dim=1)
        weights = counts / counts.sum()
        mean = (weights * means).sum(0)
        var = (weights * (variances + (means - mean) ** 2)).sum(0)
        return mean, var, counts.detach().sum()

    def gather(self, row: Tensor) -> Tensor:
        """Return the rows of all ranks: (n) becomes (ranks, n). A collective, also in backward."""
        world = self.collectives.world
        # A gather that autograd can follow: each rank adds its row to zeros in place of the others'.
        padded = nn.functional.pad(row[None], (0, 0, world.rank, world.size - world.rank - 1))
        rows: Tensor = _SumOverRanks.apply(padded, self.collectives)
        return rows

    def _count_batch(self) -> float:
        """Count one more batch, and return its weight in the running statistics."""
        if not self.track_running_stats:
            return 0.0
        assert self.num_batches_tracked is not None
        self.num_batches_tracked += 1
        return 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum

    @torch.no_grad()
    def _update_running_statistics(self, mean: Tensor, unbiased_var: Tensor, momentum: float) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        for running, value in ((self.running_mean, mean), (self.running_var, unbiased_var)):
            running.copy_(running.to(value.dtype).lerp_(value, momentum))


def convert_sync_batch_norm(model: nn.Module, collectives: RankSum, *, every: bool = True) -> None:
    """Replace every batch norm inside `model`, in place; parameters and buffers stay the same objects.

    Args:
        every: False: only PyTorch's `SyncBatchNorm`, which refuses CPUs, and on Horovod leaves each rank its own
            statistics.

    Raises:
        BackendError: the model itself is a batch norm, which cannot be replaced in place.
    """
    converted = (nn.SyncBatchNorm, SyncBatchNorm)
    kinds = BatchNorm if every and collectives.world.size > 1 else converted
    if isinstance(model, BatchNorm if every else nn.SyncBatchNorm):
        raise BackendError(
            "the model is itself a batch norm, which cannot be synchronized in place: put it into nn.Sequential."
        )
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, kinds):
                new = SyncBatchNorm(
                    child.num_features, child.eps, child.momentum, child.affine, child.track_running_stats
                )
                new.collectives = collectives
                # The same tensors, because the optimizer holds them.
                new._parameters, new._buffers = child._parameters, child._buffers
                new.train(child.training)
                setattr(parent, name, new)
