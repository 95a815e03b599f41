"""What Horovod's elastic launcher and its workers say to each other, as JSON instead of pickle.

The installer copies this file into the Horovod that it builds, as `horovod/runner/elastic/
messages.py`, and points Horovod's sender and receivers to it. Unpickling runs whatever code the
sender chose, and the launcher's HTTP server takes a PUT from any host (CVE-2024-10190); JSON can
only yield text, numbers and lists, and anything but the expected shape is refused.

It must import nothing but the standard library.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

# {network interface: [(IPv4 address, port), ...]}, as Horovod's services report themselves.
Addresses = dict[str, list[tuple[str, int]]]

# A key is 32 bytes and a host has a few interfaces: more than this is no worker.
MAX_BYTES = 1 << 20


class MalformedMessageError(ValueError):
    """The bytes are not what the protocol allows."""


def encode_worker(addresses: Mapping[str, Sequence[tuple[str, int]]], secret_key: bytes) -> bytes:
    """What a worker registers with the launcher: where it listens, and the key it signs with."""
    interfaces = {name: [list(address) for address in found] for name, found in addresses.items()}
    return json.dumps({"addresses": interfaces, "secret_key": secret_key.hex()}).encode()


def decode_worker(value: bytes) -> tuple[Addresses, bytes]:
    """The inverse of `encode_worker`; raises `MalformedMessageError` on anything else."""
    content = _load_object(value, {"addresses", "secret_key"})
    addresses, secret_key = content["addresses"], content["secret_key"]
    if not isinstance(addresses, dict) or not isinstance(secret_key, str):
        raise MalformedMessageError("addresses must be an object and secret_key a string")
    try:
        key = bytes.fromhex(secret_key)
    except ValueError as error:
        raise MalformedMessageError("secret_key must be hexadecimal") from error
    if not key:
        raise MalformedMessageError("secret_key is empty")
    return {name: [_address(item) for item in _items(addresses[name])] for name in addresses}, key


def encode_message(message: object) -> bytes:
    """One request or reply: its class's name and its attributes, which must be plain values."""
    return json.dumps({"kind": type(message).__name__, "fields": vars(message)}).encode()


def decode_message(value: bytes, kinds: Sequence[type]) -> Any:
    """An object of one of `kinds`, whose constructor takes its attributes by name."""
    content = _load_object(value, {"kind", "fields"})
    known = {kind.__name__: kind for kind in kinds}
    kind, fields = content["kind"], content["fields"]
    if not isinstance(kind, str) or kind not in known or not isinstance(fields, dict):
        raise MalformedMessageError(f"not one of {', '.join(known)}")
    if not all(isinstance(field, (str, int, type(None))) for field in fields.values()):
        raise MalformedMessageError(f"{kind} carries more than text and whole numbers")
    try:
        return known[kind](**fields)
    except TypeError as error:
        raise MalformedMessageError(f"{kind} has other fields: {error}") from error


def _load_object(value: bytes, keys: set[str]) -> dict[str, Any]:
    if len(value) > MAX_BYTES:
        raise MalformedMessageError(f"longer than {MAX_BYTES} bytes")
    try:
        content = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise MalformedMessageError("not JSON") from error
    if not isinstance(content, dict) or set(content) != keys:
        raise MalformedMessageError(f"not an object with the keys {', '.join(sorted(keys))}")
    return content


def _items(found: object) -> list[object]:
    if not isinstance(found, list):
        raise MalformedMessageError("an interface's addresses must be a list")
    return found


def _address(item: object) -> tuple[str, int]:
    if isinstance(item, list) and len(item) == 2:
        host, port = item
        if isinstance(host, str) and type(port) is int and 0 < port < 65536:
            return host, port
    raise MalformedMessageError("an address must be [host, port]")
