"""The protocols of a job's store: PyTorch's `TCPStore` and Horovod's HTTP, on one port.

PyTorch's protocol is documented by its source only: torch/csrc/distributed/c10d/TCPStoreBackend.hpp and
TCPStoreLibUvBackend.cpp. Numbers are in the machine's byte order; lengths and counts have 8 bytes:

    0 MAGIC                              first message of a client; no answer
    13 nonce          -> nonce           ping
    1 n /TOKEN/key n value               set
    6 1 n /TOKEN/key  -> 0               wait; answered once the key is set
    3 n /TOKEN/key    -> n value         get

Before it sends its token, a rank has the server prove that it knows it, by a request like HTTP's: PROVE CHALLENGE.
Queues and listing all keys, which the engines do not use, are refused like garbage. Nothing longer than its limit
is read, and very little from a client that has not sent a key with a token.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from weakref import WeakValueDictionary

MAGIC = 0x3C85F7CE
VALIDATE, SET, COMPARE_SET, GET, ADD, CHECK, WAIT, GETNUMKEYS, DELETE_KEY, APPEND, MULTI_GET, MULTI_SET = range(12)
CANCEL_WAIT, PING = 12, 13
READY, NOT_READY = b"\0", b"\1"
STOP_WAITING, WAIT_CANCELED = b"\0", b"\1"
MAX_KEY_BYTES = 4096
"""PyTorch's keys have some hundred bytes."""
MAX_VALUE_BYTES = 1 << 30
MAX_KEYS = 1 << 20
MAX_UNAUTHENTICATED_BYTES = 2 * MAX_KEY_BYTES
"""How much a client may send before a key with a token."""
READ_BYTES = 1 << 20


class RefusedError(Exception):
    """The client is no rank of this job."""


class Store:
    """Keys and values of all tokens.

    Args:
        pipe: a descriptor from which tokens are read, one a line. Keys must begin with one of them.

    Attributes:
        values: by key.
        unauthenticated: clients that have not sent a key with a token, in the order of their arrival.
    """

    def __init__(self, pipe: int) -> None:
        self._pipe, self._partial_token = pipe, b""
        os.set_blocking(pipe, False)
        self._tokens: dict[bytes, None] = {}
        self.values: dict[bytes, bytes] = {}
        self._awaited: WeakValueDictionary[bytes, asyncio.Event] = WeakValueDictionary()
        """by key, as long as a client waits for it"""
        self.unauthenticated: dict[Client, None] = {}

    def read_tokens(self) -> bool:
        """Read new tokens from the pipe; return False at its end."""
        with suppress(BlockingIOError):
            while data := os.read(self._pipe, 1 << 16):
                *tokens, self._partial_token = (self._partial_token + data).split(b"\n")
                self._tokens.update(dict.fromkeys(tokens))
            return False
        return True

    def has_token(self, key: bytes) -> bool:
        """Return True if a key is a path of the form `/TOKEN/...` with a known token."""
        token = key[1:].partition(b"/")[0]
        if token not in self._tokens:
            self.read_tokens()  # a rank that was given a new one may have sent it already
        return key[:1] == b"/" and token in self._tokens

    def proofs(self, challenge: bytes) -> bytes:
        """Return a keyed hash (HMAC-SHA256) of a challenge for each token, the newest one's first."""
        self.read_tokens()
        return b"".join(hmac.digest(token, challenge, "sha256") for token in reversed(self._tokens))

    def set(self, key: bytes, value: bytes) -> None:
        """Set a value, and wake the clients that wait for the key."""
        self.values[key] = value
        if (awaited := self._awaited.pop(key, None)) is not None:
            awaited.set()

    async def wait(self, keys: Sequence[bytes]) -> None:
        """Return once all keys have been set."""
        for key in keys:
            if key not in self.values:
                awaited = self._awaited.setdefault(key, asyncio.Event())
                await awaited.wait()


class Client:
    """The connection of one client, which is served from now on."""

    def __init__(self, sock: socket.socket, store: Store) -> None:
        self._socket, self._store = sock, store
        self._loop = asyncio.get_running_loop()
        self._is_authenticated = False
        """whether it has sent a key with a token"""
        self._unread, self._received_bytes = bytearray(), 0
        self._wait: asyncio.Task[None] | None = None
        store.unauthenticated[self] = None
        self._serving = self._loop.create_task(self._serve())

    def close(self) -> None:
        """Serve the client no more, and close its connection."""
        self._store.unauthenticated.pop(self, None)
        self._serving.cancel()

    async def _serve(self) -> None:
        """Answer all messages, until the connection ends or the client proves to be no rank."""
        try:
            await self._answer_all()
        except (RefusedError, OSError, LookupError, ValueError, struct.error):
            pass
        finally:
            self._store.unauthenticated.pop(self, None)
            self._cancel_wait()
            self._socket.close()

    async def _answer_all(self) -> None:
        # The first byte tells the protocol.
        if (first := await self._read(1))[0] != VALIDATE:
            await self._answer_request(first)
        elif await self._read(4) == struct.pack("=I", MAGIC):
            while True:
                await self._answer_query((await self._read(1))[0])

    async def _receive(self) -> None:
        limit = READ_BYTES if self._is_authenticated else MAX_UNAUTHENTICATED_BYTES - self._received_bytes
        if limit <= 0:
            raise RefusedError
        data = await self._loop.sock_recv(self._socket, limit)
        if not data:
            raise ConnectionResetError
        await asyncio.sleep(0)  # data that is there is received at once: other clients have their turn first
        self._unread += data
        self._received_bytes += len(data)

    async def _read(self, size: int) -> bytes:
        while len(self._unread) < size:
            await self._receive()
        return self._take(size)

    async def _read_to(self, end: bytes) -> bytes:
        while (place := self._unread.find(end)) < 0:
            await self._receive()
        return self._take(place + len(end))

    def _take(self, size: int) -> bytes:
        part = bytes(self._unread[:size])
        del self._unread[:size]
        return part

    async def _read_number(self, format_: str = "=Q", maximum: int | None = None) -> int:
        (number,) = struct.unpack(format_, await self._read(struct.calcsize(format_)))
        if maximum is not None and number > maximum:
            raise RefusedError
        return int(number)

    async def _read_bytes(self, maximum: int = MAX_VALUE_BYTES) -> bytes:
        return await self._read(await self._read_number(maximum=maximum))

    async def _read_key(self) -> bytes:
        key = await self._read_bytes(MAX_KEY_BYTES)
        self._authenticate(key)
        return key

    async def _read_keys(self) -> list[bytes]:
        return [await self._read_key() for _ in range(await self._read_number(maximum=MAX_KEYS))]

    def _authenticate(self, key: bytes) -> None:
        """Accept a key; after the first one with a token also keys without, which PyTorch uses on the connection.

        Raises:
            RefusedError: neither this key nor an earlier one has a token.
        """
        if not self._is_authenticated and not self._store.has_token(key):
            raise RefusedError
        self._is_authenticated = True
        self._store.unauthenticated.pop(self, None)

    async def _send(self, data: bytes) -> None:
        await self._loop.sock_sendall(self._socket, data)

    async def _send_value(self, value: bytes) -> None:
        await self._send(struct.pack("=Q", len(value)) + value)

    async def _answer_query(self, kind: int) -> None:
        """Answer one query of a `TCPStore` client."""
        values = self._store.values
        if kind == PING:
            await self._send(await self._read(4))
        elif kind in (SET, COMPARE_SET, GET, ADD, DELETE_KEY, APPEND):
            await self._answer_for_key(kind, await self._read_key())
        elif kind == MULTI_SET:
            for _ in range(await self._read_number(maximum=MAX_KEYS)):
                await self._answer_for_key(SET, await self._read_key())
        elif kind == CHECK:
            keys = await self._read_keys()
            await self._send(READY if all(key in values for key in keys) else NOT_READY)
        elif kind == WAIT:
            keys = await self._read_keys()
            self._cancel_wait()
            if all(key in values for key in keys):
                await self._send(STOP_WAITING)  # before the answer to what the client asks next
            else:
                self._wait = self._loop.create_task(self._answer_once_set(keys))
        elif kind == CANCEL_WAIT:
            self._cancel_wait()
            await self._send(WAIT_CANCELED)
        elif kind == MULTI_GET:
            for key in await self._read_keys():
                await self._send_value(values[key])
        elif kind == GETNUMKEYS and self._is_authenticated:
            await self._send(struct.pack("=q", len(values)))
        else:
            raise RefusedError

    async def _answer_once_set(self, keys: Sequence[bytes]) -> None:
        await self._store.wait(keys)
        with suppress(OSError):
            await self._send(STOP_WAITING)

    def _cancel_wait(self) -> None:
        if self._wait is not None:
            self._wait.cancel()
            self._wait = None

    async def _answer_for_key(self, kind: int, key: bytes) -> None:
        """Answer a query about one key.

        The rest of the query is read first: other clients may change the value meanwhile.

        Raises:
            KeyError: the value is not set. PyTorch's clients wait for a key before they get it.
        """
        values = self._store.values
        if kind == SET:
            self._store.set(key, await self._read_bytes())
        elif kind == GET:
            await self._send_value(values[key])
        elif kind == ADD:
            amount = await self._read_number("=q")
            total = int(values.get(key, b"0")) + amount
            self._store.set(key, str(total).encode())
            await self._send(struct.pack("=q", total))
        elif kind == COMPARE_SET:
            expected, desired = await self._read_bytes(), await self._read_bytes()
            if values.get(key, b"") == expected:
                self._store.set(key, desired)
            await self._send_value(values.get(key, expected))
        elif kind == DELETE_KEY:
            await self._send(struct.pack("=q", values.pop(key, None) is not None))
        else:
            more = await self._read_bytes()
            self._store.set(key, values.get(key, b"") + more)

    async def _answer_request(self, first: bytes) -> None:
        """Answer one HTTP request of a Horovod worker."""
        head = first + await self._read_to(b"\r\n\r\n")
        request, *fields = head.decode("latin-1").split("\r\n")
        method, _, rest = request.partition(" ")
        key = rest.partition(" ")[0].encode("latin-1")
        if method == "PROVE":
            await self._send(self._store.proofs(key))
            return
        self._authenticate(key)
        code, body = "200 OK", b""
        if method == "PUT":
            headers = dict(field.lower().partition(":")[::2] for field in fields)
            length = headers.get("content-length", "").strip()
            size = int(length) if length.isdecimal() else 0
            if size > MAX_VALUE_BYTES:
                raise RefusedError
            self._store.set(key, await self._read(size))
        elif method == "GET":
            if key in self._store.values:
                body = self._store.values[key]
            else:
                code = "404 Not Found"
        elif method != "DELETE":  # sent by a worker at its end; its keys may stay
            raise RefusedError
        await self._send(f"HTTP/1.0 {code}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
