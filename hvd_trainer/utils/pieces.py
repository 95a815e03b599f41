"""Tensors between ranks in pieces: small ones together, large ones cut.

Beside the tensors a rank needs memory for one piece, and no message has more bytes than Horovod counts in an int.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from hvd_trainer.utils import accelerator
from hvd_trainer.utils.tensors import as_bytes

PIECE_BYTES = 2**25


def move_bytes(payload: bytes | None, move: Callable[[Tensor], object]) -> Tensor:
    """Send bytes, or receive as many as come; return them as a tensor (uint8).

    Args:
        payload: to send; None: to be received.
        move: sends a tensor on the host, or fills it.
    """
    length = torch.tensor([0 if payload is None else len(payload)])
    move(length)
    content = torch.empty(int(length), dtype=torch.uint8) if payload is None else as_tensor(payload)
    move(content)
    return content


def as_tensor(payload: bytes) -> Tensor:
    """Return bytes as a tensor (uint8) of its own."""
    return torch.frombuffer(bytearray(payload), dtype=torch.uint8)


def move_in_pieces(tensors: Sequence[Tensor], move: Callable[[Tensor], object], *, receives: bool) -> None:
    """Send the contents of tensors, or fill tensors of the same types and shapes, in the same order.

    Args:
        tensors: contiguous, on any device.
        move: sends a piece (uint8, flat, on the host), or fills it.
        receives: whether it fills them.
    """
    for parts in _pieces(tensors):
        sizes, are_here = [len(part) for part in parts], all(accelerator.is_host(part.device) for part in parts)
        if are_here and len(parts) == 1:
            move(parts[0])
            continue
        shape, dtype = (sum(sizes),), torch.uint8
        piece = torch.empty(shape, dtype=dtype) if are_here else accelerator.pinned(shape, dtype)
        pairs = [*zip(piece.split(sizes), parts, strict=True)]
        if not receives:
            for place, part in pairs:
                place.copy_(part)
        move(piece)
        if receives:
            for place, part in pairs:
                part.copy_(place)


def _pieces(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the bytes of tensors in lists of views, each of `PIECE_BYTES` at most."""
    parts: list[Tensor] = []
    room = PIECE_BYTES
    for tensor in tensors:
        for part in as_bytes(tensor.detach()).split(PIECE_BYTES) if tensor.numel() else ():
            if len(part) > room:
                yield parts
                parts, room = [], PIECE_BYTES
            parts.append(part)
            room -= len(part)
    if parts:
        yield parts
