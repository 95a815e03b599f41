"""Encode the messages between Horovod's elastic launcher and its workers as JSON instead of pickle.

The installer copies this file into the Horovod that it builds, as horovod/runner/elastic/messages.py, and
patches/02-protects.patch makes sender and receivers use it. Unpickling runs what the sender chose,
and the launcher's HTTP server takes a PUT from any host (CVE-2024-10190); JSON yields text, numbers and lists
only, and any other shape than the expected one is refused.

It must import nothing but the standard library.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

Addresses = dict[str, list[tuple[str, int]]]
"""{network interface: [(IPv4 address, port), ...]}, as Horovod's services report themselves."""

MAX_MESSAGE_BYTES = 1 << 20
"""A key has 32 bytes and a host a few interfaces: a longer message is from no worker."""


class MalformedMessageError(ValueError):
    """The bytes are no message of this protocol."""


def encode_worker(addresses: Mapping[str, Sequence[tuple[str, int]]], secret_key: bytes) -> bytes:
    """Encode what a worker registers with the launcher: where it listens, and the key it signs with."""
    interfaces = {name: [list(address) for address in listed] for name, listed in addresses.items()}
    return json.dumps({"addresses": interfaces, "secret_key": secret_key.hex()}).encode()


def decode_worker(value: bytes) -> tuple[Addresses, bytes]:
    """Decode what `encode_worker` has encoded.

    Raises:
        MalformedMessageError: the value is anything else.
    """
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
    """Encode a request or reply by its class's name and its attributes, which must be plain values."""
    return json.dumps({"kind": type(message).__name__, "fields": vars(message)}).encode()


def decode_message(value: bytes, kinds: Sequence[type]) -> Any:
    """Build an object of one of `kinds`, whose constructors take their attributes by name.

    Raises:
        MalformedMessageError: the value is of no such class, or has other attributes.
    """
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
    if len(value) > MAX_MESSAGE_BYTES:
        raise MalformedMessageError(f"longer than {MAX_MESSAGE_BYTES} bytes")
    try:
        content = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise MalformedMessageError("not JSON") from error
    if not isinstance(content, dict) or set(content) != keys:
        raise MalformedMessageError(f"not an object with the keys {', '.join(sorted(keys))}")
    return content


def _items(value: object) -> list[object]:
    if not isinstance(value, list):
        raise MalformedMessageError("an interface's addresses must be a list")
    return value


def _address(item: object) -> tuple[str, int]:
    if isinstance(item, list) and len(item) == 2:
        host, port = item
        if isinstance(host, str) and type(port) is int and 0 < port < 65536:
            return host, port
    raise MalformedMessageError("an address must be [host, port]")
