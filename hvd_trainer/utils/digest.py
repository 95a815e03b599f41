"""Digests of tensors: two numbers, computed on the device, that differ if a bit differs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
MAX_ELEMENTS = 2**22
"""Number of elements that are read at once. Temporary memory is 20 bytes for each."""


@torch.no_grad()
def digest(tensors: Sequence[Tensor]) -> Tensor:
    """Return a digest of the bits of tensors (any types, shapes and devices), without waiting for a device.

    It is the sum of all elements, read as integers, and that of their squares, both modulo 2**64. Two elements
    that change by 1 and -1 leave the first as it is, and change the second, unless they trade places.

    Returns:
        int64, shape (2,), on the device of the first tensor.
    """
    device = tensors[0].device if tensors else torch.device("cpu")
    total = torch.zeros(2, dtype=torch.int64, device=device)
    for part in _parts(tensors):
        numbers = part.to(torch.int64)
        total += torch.stack([numbers.sum(), (numbers * numbers).sum()]).to(device)
    return total


def _parts(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the elements of all tensors as integers; of small ones many at once."""
    together: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        flat = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        flat = flat.reshape(-1).view(INTEGERS[flat.itemsize])
        if len(flat) >= MAX_ELEMENTS:
            yield from flat.split(MAX_ELEMENTS)
            continue
        group = together.setdefault((flat.dtype, flat.device), [])
        group.append(flat)
        if sum(map(len, group)) >= MAX_ELEMENTS:
            yield torch.cat(group)
            group.clear()
    yield from (torch.cat(group) for group in together.values() if group)
