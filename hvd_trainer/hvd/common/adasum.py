"""Adasum: gradients are added as far as they are orthogonal, and averaged as far as they are parallel.

S. Maleki et al., "Scaling Distributed Training with Adaptive Summation" (MLSys 2021, arXiv 2006.02924). For two
gradients, and applied along a binary tree:

    Adasum(a, b) = (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b
"""

from __future__ import annotations

import torch
from torch import Tensor

from hvd_trainer.hvd.common.transport import Transport


def combine(a: Tensor, b: Tensor) -> Tensor:
    """Return the Adasum of two flat tensors; sums are made in fp64, or fp32 for 16-bit numbers."""
    wide = torch.float32 if a.dtype in (torch.float16, torch.bfloat16) else torch.float64
    left, right = a.to(wide), b.to(wide)
    dot, left_square, right_square = left.dot(right), left.dot(left), right.dot(right)
    zero = torch.zeros_like(dot)
    left_share = 1 - torch.where(left_square > 0, dot / (2 * left_square), zero)
    right_share = 1 - torch.where(right_square > 0, dot / (2 * right_square), zero)
    return (left_share * left + right_share * right).to(a.dtype)


def reduce(tensor: Tensor, transport: Transport) -> Tensor:
    """Return the Adasum of all members' flat tensors: log2(members) exchanges with a partner.

    The number of members is a power of two. Partners compute the same formula on the same pair, so that all
    members get the same bits.
    """
    distance = 1
    while distance < transport.size:
        partner = transport.member ^ distance
        received = torch.empty_like(tensor)
        sent = tensor.contiguous()
        # Not by send and recv: Gloo breaks all connections when a wait for one of them times out.
        sizes = [len(sent) if member == partner else 0 for member in range(transport.size)]
        transport.all_to_all(received, sent, sizes, sizes)
        tensor = combine(sent, received) if transport.member < partner else combine(received, sent)
        distance *= 2
    return tensor
