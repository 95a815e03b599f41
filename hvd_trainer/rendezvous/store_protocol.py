"""The protocols of a job's store: PyTorch's `TCPStore` and Horovod's HTTP, on one port.

PyTorch's protocol is documented by its source only: torch/csrc/distributed/c10d/TCPStoreBackend.hpp and
TCPStoreLibUvBackend.cpp. Numbers are in the machine's byte order; lengths and counts have 8 bytes:

    0 MAGIC                              first message of a client; no answer
    13 nonce          -> nonce           ping
    1 n /TOKEN/key n value               set
    6 1 n /TOKEN/key  -> 0               wait; answered once the key is set
    3 n /TOKEN/key    -> n value         get

Queues and listing all keys, which the engines do not use, are refused like garbage. Nothing longer than its limit
is read, and very little from a client that has not sent a key with a token.
"""

from __future__ import annotations

import struct
from collections.abc import Generator

from hvd_trainer.rendezvous.store_connection import MAX_KEY_BYTES, Connection, Handler, RefusedError

MAGIC = 0x3C85F7CE
VALIDATE, SET, COMPARE_SET, GET, ADD, CHECK, WAIT, GETNUMKEYS, DELETE_KEY, APPEND, MULTI_GET, MULTI_SET = range(12)
CANCEL_WAIT, PING = 12, 13
READY, NOT_READY = b"\0", b"\1"
WAIT_CANCELED = b"\1"
MAX_VALUE_BYTES = 1 << 30
MAX_KEYS = 1 << 20


def handle_client(connection: Connection) -> Handler:
    """Handle all messages of a client. Its first byte tells the protocol."""
    first = yield 1
    if first[0] == VALIDATE:
        if (yield 4) != struct.pack("=I", MAGIC):
            raise RefusedError
        while True:
            yield from _handle_query(connection, (yield 1)[0])
    yield from _handle_request(connection, first)


def _read_number(format_: str = "=Q", maximum: int | None = None) -> Generator[int, bytes, int]:
    (number,) = struct.unpack(format_, (yield struct.calcsize(format_)))
    if maximum is not None and number > maximum:
        raise RefusedError
    return int(number)


def _read_bytes(maximum: int) -> Generator[int, bytes, bytes]:
    length = yield from _read_number(maximum=maximum)
    return (yield length) if length else b""


def _read_key(connection: Connection) -> Generator[int, bytes, bytes]:
    key = yield from _read_bytes(MAX_KEY_BYTES)
    connection.authenticate(key)
    return key


def _read_keys(connection: Connection) -> Generator[int, bytes, list[bytes]]:
    keys = []
    for _ in range((yield from _read_number(maximum=MAX_KEYS))):
        keys.append((yield from _read_key(connection)))
    return keys


def _with_length(value: bytes) -> bytes:
    return struct.pack("=Q", len(value)) + value


def _handle_query(connection: Connection, kind: int) -> Handler:
    """Handle one query of a `TCPStore` client."""
    store, send = connection.store, connection.send
    if kind == PING:
        send((yield 4))
    elif kind in (SET, COMPARE_SET, GET, ADD, DELETE_KEY, APPEND):
        yield from _handle_key(connection, kind, (yield from _read_key(connection)))
    elif kind == MULTI_SET:
        for _ in range((yield from _read_number(maximum=MAX_KEYS))):
            yield from _handle_key(connection, SET, (yield from _read_key(connection)))
    elif kind == CHECK:
        keys = yield from _read_keys(connection)
        send(READY if all(key in store.values for key in keys) else NOT_READY)
    elif kind == WAIT:
        store.wait((yield from _read_keys(connection)), connection)
    elif kind == CANCEL_WAIT:
        store.cancel_wait(connection)
        send(WAIT_CANCELED)
    elif kind == MULTI_GET:
        for key in (yield from _read_keys(connection)):
            send(_with_length(store.values[key]))
    elif kind == GETNUMKEYS and connection.is_authenticated:
        send(struct.pack("=q", len(store.values)))
    else:
        raise RefusedError


def _handle_key(connection: Connection, kind: int, key: bytes) -> Handler:
    """Handle a query about one key.

    The rest of the query is read first: other clients may change the value meanwhile.

    Raises:
        KeyError: the value is not set. PyTorch's clients wait for a key before they get it.
    """
    store, send = connection.store, connection.send
    if kind == SET:
        store.set(key, (yield from _read_bytes(MAX_VALUE_BYTES)))
    elif kind == GET:
        send(_with_length(store.values[key]))
    elif kind == ADD:
        amount = yield from _read_number("=q")
        total = int(store.values.get(key, b"0")) + amount
        store.set(key, str(total).encode())
        send(struct.pack("=q", total))
    elif kind == COMPARE_SET:
        expected = yield from _read_bytes(MAX_VALUE_BYTES)
        desired = yield from _read_bytes(MAX_VALUE_BYTES)
        if store.values.get(key, b"") == expected:
            store.set(key, desired)
        send(_with_length(store.values.get(key, expected)))
    elif kind == DELETE_KEY:
        send(struct.pack("=q", store.values.pop(key, None) is not None))
    else:
        more = yield from _read_bytes(MAX_VALUE_BYTES)
        store.set(key, store.values.get(key, b"") + more)


def _handle_request(connection: Connection, first: bytes) -> Handler:
    """Handle one HTTP request of a Horovod worker; then the connection is finished."""
    head = first + (yield b"\r\n\r\n")
    request, *fields = head.decode("latin-1").split("\r\n")
    method, _, rest = request.partition(" ")
    key = rest.partition(" ")[0].encode("latin-1")
    connection.authenticate(key)
    store, code, body = connection.store, "200 OK", b""
    if method == "PUT":
        headers = dict(field.lower().partition(":")[::2] for field in fields)
        text = headers.get("content-length", "").strip()
        length = int(text) if text.isdecimal() else 0
        if length > MAX_VALUE_BYTES:
            raise RefusedError
        store.set(key, (yield length) if length else b"")
    elif method == "GET":
        if key in store.values:
            body = store.values[key]
        else:
            code = "404 Not Found"
    elif method != "DELETE":  # sent by a worker at its end; its keys may stay
        raise RefusedError
    connection.send(f"HTTP/1.0 {code}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
