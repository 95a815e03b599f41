"""What clients of a job's store say, and what is answered: PyTorch's `TCPStore` and Horovod's HTTP, on one port.

PyTorch's protocol is described by its source only: torch/csrc/distributed/c10d/TCPStoreBackend.hpp and
TCPStoreLibUvBackend.cpp. Its numbers are of the machine's byte order, and have 8 bytes for lengths and counts:

    0 MAGIC                              "I speak this": first of all, and not answered
    13 nonce          -> nonce           "are you there?"
    1 n /TOKEN/key n value               set
    6 1 n /TOKEN/key  -> 0               wait; answered once it is set
    3 n /TOKEN/key    -> n value         get

Queues and the list of all keys, which engines do not ask for, are refused like garbage. Nothing longer than its
limit is read, and next to nothing from those who have not named a key with a token.
"""

from __future__ import annotations

import struct
from collections.abc import Generator

from hvd_trainer.rendezvous.store_connection import MAX_KEY_BYTES, Connection, RefusedError, Steps, Store

MAGIC = 0x3C85F7CE
VALIDATE, SET, COMPARE_SET, GET, ADD, CHECK, WAIT, GETNUMKEYS, DELETE_KEY, APPEND, MULTI_GET, MULTI_SET = range(12)
CANCEL_WAIT, PING = 12, 13
READY, NOT_READY = b"\0", b"\1"
WAIT_CANCELED = b"\1"
MAX_VALUE_BYTES = 1 << 30
MAX_KEYS = 1 << 20


def steps(connection: Connection) -> Steps:
    """Reads a connection from its first byte on, which says whose protocol it is."""
    first = yield 1
    if first[0] == VALIDATE:
        if (yield 4) != struct.pack("=I", MAGIC):
            raise RefusedError
        while True:
            yield from _query(connection, (yield 1)[0])
    yield from _request(connection, first)


def _number(form: str = "=Q", most: int | None = None) -> Generator[int, bytes, int]:
    (number,) = struct.unpack(form, (yield struct.calcsize(form)))
    if most is not None and number > most:
        raise RefusedError
    return int(number)


def _bytes(most: int) -> Generator[int, bytes, bytes]:
    length = yield from _number(most=most)
    return (yield length) if length else b""


def _key(connection: Connection) -> Generator[int, bytes, bytes]:
    key = yield from _bytes(MAX_KEY_BYTES)
    connection.admit(key)
    return key


def _keys(connection: Connection) -> Generator[int, bytes, list[bytes]]:
    keys = []
    for _ in range((yield from _number(most=MAX_KEYS))):
        keys.append((yield from _key(connection)))
    return keys


def _answer(value: bytes) -> bytes:
    return struct.pack("=Q", len(value)) + value


def _query(connection: Connection, kind: int) -> Steps:
    """One query of a `TCPStore`, and its answer."""
    store, send = connection.store, connection.send
    if kind == PING:
        send((yield 4))
    elif kind == SET:
        key = yield from _key(connection)
        store.set(key, (yield from _bytes(MAX_VALUE_BYTES)))
    elif kind == GET:
        send(_answer(_found(store, (yield from _key(connection)))))
    elif kind == ADD:
        key = yield from _key(connection)
        total = int(store.values.get(key, b"0")) + (yield from _number("=q"))
        store.set(key, str(total).encode())
        send(struct.pack("=q", total))
    elif kind == CHECK:
        keys = yield from _keys(connection)
        send(READY if all(key in store.values for key in keys) else NOT_READY)
    elif kind == WAIT:
        store.wait((yield from _keys(connection)), connection)
    elif kind == CANCEL_WAIT:
        store.wait_no_more(connection)
        send(WAIT_CANCELED)
    elif kind == COMPARE_SET:
        key = yield from _key(connection)
        expected = yield from _bytes(MAX_VALUE_BYTES)
        desired = yield from _bytes(MAX_VALUE_BYTES)
        if store.values.get(key, b"") == expected:
            store.set(key, desired)
        send(_answer(store.values.get(key, expected)))
    elif kind == DELETE_KEY:
        key = yield from _key(connection)
        send(struct.pack("=q", store.values.pop(key, None) is not None))
    elif kind == APPEND:
        key = yield from _key(connection)
        store.set(key, store.values.get(key, b"") + (yield from _bytes(MAX_VALUE_BYTES)))
    elif kind == MULTI_GET:
        for key in (yield from _keys(connection)):
            send(_answer(_found(store, key)))
    elif kind == MULTI_SET:
        for _ in range((yield from _number(most=MAX_KEYS))):
            key = yield from _key(connection)
            store.set(key, (yield from _bytes(MAX_VALUE_BYTES)))
    elif kind == GETNUMKEYS and not connection.stranger:
        send(struct.pack("=q", len(store.values)))
    else:
        raise RefusedError


def _found(store: Store, key: bytes) -> bytes:
    """The value: PyTorch's clients wait for it before they ask."""
    if key not in store.values:
        raise RefusedError
    return store.values[key]


def _request(connection: Connection, first: bytes) -> Steps:
    """One HTTP request, as Horovod's workers send it, and its answer; then the connection ends."""
    head = first + (yield b"\r\n\r\n")
    request, *fields = head.decode("latin-1").split("\r\n")
    method, _, rest = request.partition(" ")
    key = rest.partition(" ")[0].encode("latin-1")
    connection.admit(key)
    store, code, body = connection.store, "200 OK", b""
    if method == "PUT":
        lengths = [value for name, _, value in (field.partition(":") for field in fields) if _is_length(name)]
        length = int(lengths[0]) if lengths and lengths[0].strip().isdecimal() else 0
        if length > MAX_VALUE_BYTES:
            raise RefusedError
        store.set(key, (yield length) if length else b"")
    elif method == "GET":
        if key in store.values:
            body = store.values[key]
        else:
            code = "404 Not Found"
    elif method != "DELETE":  # by which a worker says that it has done: its keys may stay
        raise RefusedError
    connection.send(f"HTTP/1.0 {code}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)


def _is_length(name: str) -> bool:
    return name.strip().lower() == "content-length"
