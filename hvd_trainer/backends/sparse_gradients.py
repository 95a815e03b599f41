"""Sparse gradients, which no bucket holds: every rank gathers the rows of all, also one that has none itself."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Gather = Callable[[Tensor, str], Callable[[], Tensor]]
"""Start to gather the rows of all ranks under a name; return what waits for them."""


def sparse_dims(gradient: Tensor | None) -> int:
    """Return in how many dimensions a gradient is sparse; 0 if it is dense, or there is none."""
    return gradient.sparse_dim() if gradient is not None and gradient.is_sparse else 0


def as_sparse(gradient: Tensor | None, like: Tensor, dims: int) -> Tensor:
    """Return a gradient that is sparse in so many dimensions; None counts as zero.

    Args:
        like: of its shape and type, on its device.
    """
    if gradient is None:
        rows = torch.empty(dims, 0, dtype=torch.int64, device=like.device)
        values = torch.empty(0, *like.shape[dims:], dtype=like.dtype, device=like.device)
        return torch.sparse_coo_tensor(rows, values, like.shape)
    return gradient if sparse_dims(gradient) == dims else gradient.to_dense().to_sparse(dims)


def start_sum(gradient: Tensor, name: str, gather: Gather, divisor: int = 1) -> Callable[[], Tensor]:
    """Start to add up a sparse gradient over ranks, on each of which it is sparse in the same dimensions.

    Args:
        name: the same on all ranks.
        divisor: of the sum.

    Returns:
        What waits, and returns the sum, which is sparse and not coalesced.
    """
    # Gathered along the first dimension, so the indices have to be rows.
    wait_rows = gather(gradient._indices().t().contiguous(), f"{name}.indices")
    wait_values = gather(gradient._values().contiguous(), f"{name}.values")

    def wait() -> Tensor:
        rows, values = wait_rows(), wait_values()
        return torch.sparse_coo_tensor(rows.t(), values / divisor if divisor != 1 else values, gradient.shape)

    return wait
