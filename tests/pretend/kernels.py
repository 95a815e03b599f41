"""Batch norm in parts, which PyTorch has for GPUs alone: written with operators of which it has all."""

from __future__ import annotations

from typing import Any

_library: Any = None


def register() -> None:
    """Give the device the five operators of synchronized batch norm."""
    global _library
    import torch

    _library = torch.library.Library("aten", "IMPL")
    for function in (
        batch_norm_stats,
        batch_norm_gather_stats_with_counts,
        batch_norm_elemt,
        batch_norm_backward_reduce,
        batch_norm_backward_elemt,
    ):
        _library.impl(function.__name__, function, "PrivateUse1")


def _shape(input: Any) -> list[int]:
    return [1, -1] + [1] * (input.dim() - 2)


def _dims(input: Any) -> list[int]:
    return [0, *range(2, input.dim())]


def batch_norm_stats(input: Any, eps: float) -> Any:
    """Return mean and 1 / sqrt(variance + eps) of each channel."""
    import torch

    var, mean = torch.var_mean(input.float(), _dims(input), correction=0)
    return mean, (var + eps).rsqrt()


def batch_norm_gather_stats_with_counts(
    input: Any,
    mean: Any,
    invstd: Any,
    running_mean: Any,
    running_var: Any,
    momentum: float,
    eps: float,
    counts: Any,
) -> Any:
    """Combine the statistics of all ranks, a row each; update the running ones."""
    import torch

    weights = counts.float().unsqueeze(1)
    total = weights.sum()
    whole = (weights * mean).sum(0) / total
    squares = (weights * (invstd.pow(-2) - eps + (mean - whole) ** 2)).sum(0)
    if running_mean is not None:
        running_mean.mul_(1 - momentum).add_(whole.to(running_mean.dtype), alpha=momentum)
        unbiased = squares / torch.clamp(total - 1, min=1)
        running_var.mul_(1 - momentum).add_(unbiased.to(running_var.dtype), alpha=momentum)
    return whole, (squares / total + eps).rsqrt()


def batch_norm_elemt(input: Any, weight: Any, bias: Any, mean: Any, invstd: Any, eps: float) -> Any:
    """Normalise, scale and shift."""
    shape = _shape(input)
    output = (input.float() - mean.view(shape)) * invstd.view(shape)
    if weight is not None:
        output = output * weight.float().view(shape) + bias.float().view(shape)
    return output.to(input.dtype)


def batch_norm_backward_reduce(
    grad: Any, input: Any, mean: Any, invstd: Any, weight: Any, for_input: bool, for_weight: bool, for_bias: bool
) -> Any:
    """Return the sums over a channel that backward needs."""
    dims, shape = _dims(input), _shape(input)
    sum_dy = grad.float().sum(dims)
    sum_dy_xmu = (grad.float() * (input.float() - mean.view(shape))).sum(dims)
    like = sum_dy if weight is None else weight
    grad_weight = (sum_dy_xmu * invstd).to(like.dtype) if for_weight else None
    return sum_dy, sum_dy_xmu, grad_weight, sum_dy.to(like.dtype) if for_bias else None


def batch_norm_backward_elemt(
    grad: Any, input: Any, mean: Any, invstd: Any, weight: Any, sum_dy: Any, sum_dy_xmu: Any, counts: Any
) -> Any:
    """Return the gradient of the input, from all ranks' sums."""
    shape, total = _shape(input), counts.sum().float()
    centred = input.float() - mean.view(shape)
    part = (sum_dy / total).view(shape) + centred * (invstd**2 * sum_dy_xmu / total).view(shape)
    scale = invstd if weight is None else invstd * weight.float()
    return ((grad.float() - part) * scale.view(shape)).to(input.dtype)
