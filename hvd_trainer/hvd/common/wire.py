"""Encode and decode the message that each rank sends in one round of a controller, as MessagePack.

flags, and for each request: encoded signature, number, index of the device, and the tensor, if that is small
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache

import msgspec

from hvd_trainer.hvd.common.matching import Matcher
from hvd_trainer.hvd.common.request import Request, Signature

MAX_REQUESTS = 1 << 10
"""In one message; further ones have to wait for the next round."""
JOINED, SHUTDOWN, BLOCKED, ZEROS_ON_HOST = 1, 2, 4, 8
"""Flags of a member: it has joined, shuts down, waits for operations whose names others use for other ones, or has
joined without a device for its zeros."""
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[int, list[tuple[bytes, int, int, bytes]]]).decode
# Scripts ask for the same again and again, and ranks for the same as others.
_decode_signature = lru_cache(maxsize=4 * MAX_REQUESTS)(msgspec.msgpack.Decoder(Signature).decode)


@lru_cache(maxsize=4 * MAX_REQUESTS)
def _encode_signature(signature: Signature) -> tuple[bytes, int]:
    """Return an encoded signature, and how many bytes travel with it."""
    return _encode(signature), signature.inline_bytes


def write(requests: Sequence[Request], flags: int) -> bytes:
    """Return this rank's message, which asks for at most `MAX_REQUESTS` operations."""
    asked = []
    for request in requests:
        signature, num_bytes = _encode_signature(request.signature)
        payload = ctypes.string_at(request.tensors[0].data_ptr(), num_bytes) if num_bytes else b""
        asked.append((signature, request.number, request.device_index, payload))
    return _encode((flags, asked))


def read(member: int, message: bytes | bytearray, matcher: Matcher) -> int:
    """Give the requests of a member's message to the matcher; return its flags."""
    flags, asked = _decode(message)
    for signature, number, device_index, payload in asked:
        matcher.add(member, _decode_signature(signature), number, payload, device_index)
    return flags
