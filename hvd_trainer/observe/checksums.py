"""Shorten tensors and samples for a trace: checksums of their bytes, and a sample of their values."""

from __future__ import annotations

import math
from collections.abc import Iterable
from hashlib import blake2b
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from hvd_trainer.data import Batch

KEPT_BYTES = 2 * 2**30
"""Of values on all ranks together. Of a model that is too large for that, every n-th element is kept."""
COPIES = 4
"""As large as the model, at each moment: parameters, gradients, and what Adam knows of them."""
SMALL = 4096
"""Tensors of up to so many elements are always kept whole."""


def stride(tensors: Iterable[Tensor], moments: int) -> int:
    """Return n such that every n-th element of large tensors, of all moments together, fits into KEPT_BYTES.

    Args:
        tensors: the model's parameters and buffers.
    """
    size = sum(_local(t).numel() * t.element_size() for t in tensors if not t.is_meta)
    return max(1, math.ceil(COPIES * size * moments / KEPT_BYTES))


def subsample(tensor: Tensor, stride: int) -> Tensor:
    """Return a flat copy of every `stride`-th element, or of all elements of a small tensor."""
    return tensor.reshape(-1)[:: stride if tensor.numel() > SMALL else 1].clone()


def host_copies(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Copy tensors to host memory, by name: whole tensors, or this rank's shards; meta tensors are left out."""
    return {name: _local(t).to("cpu", copy=True).contiguous() for name, t in named if not t.is_meta}


def _local(tensor: Tensor) -> Tensor:
    # Known by what it can: importing the class of sharded tensors takes half a second.
    local = getattr(tensor, "to_local", None)
    tensor = tensor.detach() if local is None else local().detach()
    return tensor if tensor.layout == torch.strided else tensor.to_dense()


def checksum(tensor: Tensor) -> str:
    """Return the 8-byte BLAKE2b digest of a tensor's bytes, in hex."""
    return blake2b(_bytes(tensor).numpy().data, digest_size=8).hexdigest()


def sample_checksums(batch: Batch) -> list[str]:
    """Return one text per sample: the checksums of its inputs and of its targets, joined by a dash."""
    inputs, targets = map(_of_rows, batch)
    return [f"{one}-{other}" for one, other in zip_longest(inputs, targets, fillvalue="")]


def _of_rows(part: Any) -> list[str]:
    leaves = [_local(leaf).cpu() for leaf in tree_leaves(part) if isinstance(leaf, Tensor) and leaf.dim()]
    rows = [_bytes(leaf).view(len(leaf), -1).numpy() for leaf in leaves if len(leaf) == len(leaves[0])]
    return [
        blake2b(b"".join(row.tobytes() for row in its), digest_size=8).hexdigest()
        for its in zip(*rows, strict=True)
    ]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
