"""Batch norm in parts, which PyTorch has for GPUs alone: written with operators of which it has all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_library = torch.library.Library("aten", "IMPL")


def register() -> None:
    """Give the device the five operators of synchronized batch norm."""
    for function in all_of_batch_norm():
        _library.impl(function.__name__, function, "PrivateUse1")


def all_of_batch_norm() -> tuple[Callable[..., Any], ...]:
    """Return the five, each with the name that it has in PyTorch."""
    forward = batch_norm_stats, batch_norm_gather_stats_with_counts, batch_norm_elemt
    return *forward, batch_norm_backward_reduce, batch_norm_backward_elemt


def _wide(values: Any) -> Any:
    """Return values in the type that kernels compute in: of 16-bit numbers fp32."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _for_channels(values: Any, input: Any) -> Any:
    return _wide(values).view([1, -1] + [1] * (input.dim() - 2))


def _centred(input: Any, mean: Any) -> Any:
    return _wide(input) - _for_channels(mean, input)


def _dims(input: Any) -> list[int]:
    return [0, *range(2, input.dim())]


def batch_norm_stats(input: Any, eps: float) -> Any:
    """Return mean and 1 / sqrt(variance + eps) of each channel."""
    var, mean = torch.var_mean(_wide(input), _dims(input), correction=0)
    return mean, (var + eps).rsqrt()


def batch_norm_gather_stats_with_counts(
    input: Any,
    means: Any,
    invstds: Any,
    running_mean: Any,
    running_var: Any,
    momentum: float,
    eps: float,
    counts: Any,
) -> Any:
    """Combine the statistics of all ranks, a row each; update the running ones."""
    assert counts.dtype == (input if running_mean is None else running_mean).dtype, "else the kernel refuses"
    weights = _wide(counts).unsqueeze(1)
    total = weights.sum()
    mean = (weights * means).sum(0) / total
    squares = (weights * (invstds.pow(-2) - eps + (means - mean) ** 2)).sum(0)
    if running_mean is not None:
        running_mean.mul_(1 - momentum).add_(mean.to(running_mean.dtype), alpha=momentum)
        unbiased = squares / torch.clamp(total - 1, min=1)
        running_var.mul_(1 - momentum).add_(unbiased.to(running_var.dtype), alpha=momentum)
    return mean, (squares / total + eps).rsqrt()


def batch_norm_elemt(input: Any, weight: Any, bias: Any, mean: Any, invstd: Any, eps: float) -> Any:
    """Normalise, scale and shift."""
    output = _centred(input, mean) * _for_channels(invstd, input)
    if weight is not None:
        output = output * _for_channels(weight, input)
    if bias is not None:
        output = output + _for_channels(bias, input)
    return output.to(input.dtype)


def batch_norm_backward_reduce(
    grad: Any, input: Any, mean: Any, invstd: Any, weight: Any, for_input: bool, for_weight: bool, for_bias: bool
) -> Any:
    """Return the sums over a channel that backward needs."""
    assert grad.stride() == input.stride(), "a kernel takes both for laid out alike"
    sum_dy = _wide(grad).sum(_dims(input))
    sum_dy_xmu = (_wide(grad) * _centred(input, mean)).sum(_dims(input))
    like = sum_dy if weight is None else weight
    grad_weight = (sum_dy_xmu * invstd).to(like.dtype) if for_weight else None
    return sum_dy, sum_dy_xmu, grad_weight, sum_dy.to(like.dtype) if for_bias else None


def batch_norm_backward_elemt(
    grad: Any, input: Any, mean: Any, invstd: Any, weight: Any, sum_dy: Any, sum_dy_xmu: Any, counts: Any
) -> Any:
    """Return the gradient of the input, from all ranks' sums."""
    assert counts.dtype == torch.int32
    assert counts.is_contiguous(), "the kernel reads the counts as they lie in memory"
    total = counts.sum()
    slope = _for_channels(invstd**2 * sum_dy_xmu / total, input)
    part = _for_channels(sum_dy / total, input) + _centred(input, mean) * slope
    scale = invstd if weight is None else invstd * _wide(weight)
    return ((_wide(grad) - part) * _for_channels(scale, input)).to(input.dtype)
