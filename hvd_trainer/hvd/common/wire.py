"""Encode and decode the message that each rank sends in one round of a controller.

flags, number of cached requests                    2 + 2 bytes
per cached request: id, number                      4 + 4 bytes
                    its tensor, if it is small
requests that are not in the cache, in full         MessagePack, only if there are some
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence

import msgspec

from hvd_trainer.hvd.common.matching import Matcher
from hvd_trainer.hvd.common.request import Request, Signature

HEADER = struct.Struct("<HH")
ENTRY = struct.Struct("<II")
MAX_REQUESTS = 1 << 10
"""In one message; further ones have to wait for the next round."""
JOINED, SHUTDOWN = 1, 2
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[tuple[Signature, int]]).decode


def write(requests: Sequence[Request], matcher: Matcher, flags: int) -> bytes:
    """Return this rank's message, which asks for at most `MAX_REQUESTS` operations."""
    in_full: list[tuple[Signature, int]] = []
    parts = [b""]
    num_cached = 0
    for request in requests:
        id_ = matcher.cached_id(request.signature)
        if id_ is None:
            in_full.append((request.signature, request.number))
            continue
        num_cached += 1
        parts.append(ENTRY.pack(id_, request.number))
        num_bytes = matcher.cached(id_).inline_bytes[matcher.me]
        if num_bytes:
            parts.append(ctypes.string_at(request.tensors[0].data_ptr(), num_bytes))
    parts[0] = HEADER.pack(flags, num_cached)
    if in_full:
        parts.append(_encode(in_full))
    return b"".join(parts)


def read(member: int, message: bytes, matcher: Matcher) -> int:
    """Give the requests of a member's message to the matcher; return its flags."""
    flags, num_cached = HEADER.unpack_from(message)
    offset = HEADER.size
    for _ in range(num_cached):
        id_, number = ENTRY.unpack_from(message, offset)
        offset += ENTRY.size
        entry = matcher.cached(id_)
        end = offset + entry.inline_bytes[member]
        matcher.add(member, entry.signatures[member], number, id_, message[offset:end])
        offset = end
    if offset < len(message):
        for signature, number in _decode(message[offset:]):
            matcher.add(member, signature, number)
    return int(flags)
