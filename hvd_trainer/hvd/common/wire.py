"""Encode and decode the message that each rank sends in one round of a controller.

A row of fixed size goes to every member:

    flags, number of cached requests, size of the extension       2 + 2 + 4 bytes
    per cached request: id, number                                4 + 4 bytes
                        its tensor, if it is small                padded to 8 bytes

Requests that are not in the cache are described in the extension. It has an exchange of its own, when a row
announces one.
"""

from __future__ import annotations

import struct

import msgspec
import torch
from torch import Tensor

from hvd_trainer.hvd.common.matching import Matcher
from hvd_trainer.hvd.common.request import Request, Signature

ROW_BYTES = 1024
HEADER = struct.Struct("<HHI")
ENTRY = struct.Struct("<II")
JOINED, SHUTDOWN = 1, 2
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[tuple[Signature, int]]).decode


def padded(num_bytes: int) -> int:
    """Return the size rounded up so that any type can be read behind it."""
    return -(-num_bytes // 8) * 8


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a flat view of a contiguous tensor as uint8."""
    flat = tensor.view(-1)
    if len(flat) == 1:
        flat = flat.as_strided((1,), (1,))  # that of an expanded tensor may be 0
    return flat.view(torch.uint8)


class RowWriter:
    """Writes this rank's row, again and again into the same memory."""

    def __init__(self) -> None:
        self.row = torch.zeros(ROW_BYTES, dtype=torch.uint8)
        self._memory = memoryview(self.row.numpy().data)

    def write(self, requests: list[Request], matcher: Matcher, flags: int) -> tuple[bytes, int]:
        """Write as many requests as fit.

        Returns:
            The extension, and the number of requests that were written: the first ones.
        """
        in_full: list[tuple[Signature, int]] = []
        offset, num_cached, num_written = HEADER.size, 0, 0
        for request in requests:
            id_ = matcher.cached_id(request.signature)
            if id_ is None:
                in_full.append((request.signature, request.number))
            else:
                num_bytes = request.signature.inline_bytes
                end = offset + ENTRY.size + padded(num_bytes)
                if end > ROW_BYTES:
                    break
                ENTRY.pack_into(self._memory, offset, id_, request.number)
                if num_bytes:
                    begin = offset + ENTRY.size
                    self.row[begin : begin + num_bytes] = as_bytes(request.tensors[0])
                offset, num_cached = end, num_cached + 1
            num_written += 1
        extension = _encode(in_full) if in_full else b""
        HEADER.pack_into(self._memory, 0, flags, num_cached, len(extension))
        return extension, num_written


def read_row(member: int, rows: Tensor, memory: memoryview, matcher: Matcher) -> tuple[int, int]:
    """Give the cached requests of a member's row to the matcher.

    Args:
        rows: (members, ROW_BYTES), which the next round overwrites.
        memory: of this member's row.

    Returns:
        The row's flags, and the size of the extension.
    """
    flags, num_cached, extension_bytes = HEADER.unpack_from(memory)
    offset = HEADER.size
    for _ in range(num_cached):
        id_, number = ENTRY.unpack_from(memory, offset)
        offset += ENTRY.size
        num_bytes = matcher.cached(id_).inline_bytes[member]
        payload = rows[member, offset : offset + num_bytes].clone() if num_bytes else None
        matcher.add_cached(member, id_, number, payload)
        offset += padded(num_bytes)
    return flags, extension_bytes


def read_extension(member: int, extension: bytes, matcher: Matcher) -> None:
    """Give the requests that a member has described in full to the matcher."""
    for signature, number in _decode(extension):
        matcher.add(member, signature, number)
