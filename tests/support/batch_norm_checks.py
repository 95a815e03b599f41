"""Batch norm over ranks in bf16 and fp16, beside one in fp64 over the samples of all ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

CHANNELS = 3
TYPES = (
    *((torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)),
    *((torch.float16, torch.float16), (torch.float16, torch.float32)),
)
"""The types of the input, and of parameters and statistics."""


def samples(rank: int, dtype: torch.dtype, mean: float) -> Tensor:
    """Return a rank's input. Ranks have different numbers of samples, which bf16 cannot count."""
    generator = torch.Generator().manual_seed(rank)
    return (mean + torch.randn(257 + 10 * rank, CHANNELS, 2, generator=generator)).to(dtype)


def rounds_its_results_only(
    layer: Callable[[nn.BatchNorm1d], nn.Module], rank: int, size: int, device: torch.device | str = "cpu"
) -> None:
    """Check outputs, gradients and statistics of batch norm over ranks: each is rounded once, at the end.

    Args:
        layer: returns batch norm over ranks with the parameters and statistics of a plain one.
        rank: whose part is checked.
        size: the number of ranks.
        device: of the rank's input.
    """
    for dtype, kept in TYPES:
        exact = nn.BatchNorm1d(CHANNELS).double()
        plain = nn.BatchNorm1d(CHANNELS).to(kept)
        for parameter in (*exact.parameters(), *plain.parameters()):
            nn.init.constant_(parameter, 0.75)
        everyone = [samples(other, dtype, 100.24) for other in range(size)]
        targets = [samples(other + size, dtype, 1.0) for other in range(size)]
        targets = [target[: len(input)] for target, input in zip(targets, everyone, strict=True)]
        whole = torch.cat(everyone).double().requires_grad_()
        outputs = exact(whole).split([*map(len, everyone)])
        losses = [(out * target).sum() for out, target in zip(outputs, targets, strict=True)]
        grads = torch.autograd.grad(sum(losses), whole, retain_graph=True)[0].split([*map(len, everyone)])
        losses[rank].backward()  # weight and bias have this rank's part of the gradient

        own, input = layer(plain), everyone[rank].to(device, copy=True).requires_grad_()
        output = own(input)
        output.backward(targets[rank].to(device))
        assert output.dtype == dtype
        assert input.grad is not None
        near(output, outputs[rank])
        near(input.grad, grads[rank])
        for theirs, ours in zip(exact.parameters(), own.parameters(), strict=True):
            assert theirs.grad is not None
            assert ours.grad is not None
            near(ours.grad, theirs.grad, atol=1e-5 * input.numel() / CHANNELS)
        for theirs, ours in zip(exact.buffers(), own.buffers(), strict=True):
            near(ours, theirs)


def near(ours: Tensor, exact: Tensor, atol: float = 2e-4) -> None:
    """Check that a tensor is as exact as its type; fp32 near 100 is itself wrong by up to 4e-6 in each sample."""
    rounding = torch.finfo(ours.dtype).eps if ours.is_floating_point() else 0.0
    torch.testing.assert_close(ours.cpu().double(), exact.double(), rtol=rounding, atol=atol)
