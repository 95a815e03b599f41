"""Attacks of another user of the machine on a job's sockets, by the standard library only."""

from __future__ import annotations

import multiprocessing
import os
import random
import socket
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any

NOBODY = 65534
MAGIC = struct.pack("=BI", 0, 0x3C85F7CE)
ANSWER_S = 1.0
HELD = 50
"""Connections with incomplete requests that are kept open."""


def by_another_user(function: Callable[..., Any], *args: Any) -> Any:
    """Return the result of a function that is called in a process of the user `nobody`."""
    # Load the codec now: the other user may not be able to read Python's files.
    "localhost".encode("idna")
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)

    def call() -> None:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        theirs.send(function(*args))

    process = context.Process(target=call)
    process.start()
    theirs.close()
    try:
        return ours.recv()
    finally:
        process.join()


def readable(paths: Sequence[str]) -> list[str]:
    """Return the files that can be read."""
    return [path for path in paths if _reads(path)]


def _reads(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            file.read(1)
    except OSError:
        return False
    return True


def string(data: bytes) -> bytes:
    return struct.pack("=Q", len(data)) + data


def queries(key: bytes) -> dict[str, bytes]:
    """Return all queries of PyTorch's clients for a key, and those without a key, by name."""
    keyed = string(key)
    one = struct.pack("=Q", 1) + keyed
    return {
        "set": b"\1" + keyed + string(b"evil"),
        "compare_set": b"\2" + keyed + string(b"") + string(b"evil"),
        "get": b"\3" + keyed,
        "add": b"\4" + keyed + struct.pack("=q", 1),
        "check": b"\5" + one,
        "wait": b"\6" + one,
        "num_keys": b"\7",
        "delete": b"\10" + keyed,
        "append": b"\11" + keyed + string(b"evil"),
        "multi_get": b"\12" + one,
        "multi_set": b"\13" + one + string(b"evil"),
        "queue_push": b"\16" + keyed + string(b"evil"),
        "queue_pop": b"\17" + keyed,
        "list_keys": b"\21",
        "list_keys_": b"\22",
    }


def requests(key: str) -> dict[str, bytes]:
    """Return the HTTP requests of Horovod's clients for a key."""
    return {
        "GET": f"GET {key} HTTP/1.1\r\nHost: x\r\n\r\n".encode(),
        "PUT": f"PUT {key} HTTP/1.1\r\nContent-Length: 4\r\n\r\nevil".encode(),
        "DELETE": f"DELETE {key} HTTP/1.1\r\n\r\n".encode(),
        "list": b"GET / HTTP/1.1\r\n\r\n",
    }


def answers(ports: Sequence[int], key: str) -> dict[str, bytes]:
    """Return the answers of sockets to a client that knows the protocols and no token."""
    received = {}
    with ExitStack() as stack:
        lines = {}
        for port in ports:
            asked = {name: MAGIC + query for name, query in queries(key.encode()).items()} | requests(key)
            for name, data in asked.items():
                with suppress(OSError):
                    line = stack.enter_context(socket.create_connection(("127.0.0.1", port), ANSWER_S))
                    line.sendall(data)
                    lines[f"{name} at {port}"] = line
        time.sleep(ANSWER_S)
        for name, line in lines.items():
            line.setblocking(False)
            with suppress(OSError):
                received[name] = line.recv(1000)
    return {name: answer for name, answer in received.items() if answer}


def flood(ports: Sequence[int], number: int, seed: int = 0) -> int:
    """Send garbage, oversized, incomplete and slow requests; return how many connections were accepted."""
    chance = random.Random(seed)
    sent = 0
    with ExitStack() as stack:
        held: list[socket.socket] = []
        for _ in range(number):
            with suppress(OSError):
                line = socket.create_connection(("127.0.0.1", chance.choice(ports)), ANSWER_S)
                sent += 1
                line.setblocking(False)
                with suppress(OSError):
                    line.sendall(_request(chance))
                if len(held) < HELD:
                    held.append(stack.enter_context(line))
                else:
                    line.close()
    return sent


def _request(chance: random.Random) -> bytes:
    sound = [MAGIC + query for query in queries(b"/" + b"0" * 32 + b"/peers").values()]
    sound += [*requests("/" + "0" * 32 + "/horovod:1/global/0").values(), b"PROVE 0\r\n\r\n", bytes(20)]
    kind = chance.randrange(7)
    if kind == 0:
        return chance.randbytes(chance.randrange(2000))
    if kind == 1:  # incomplete
        whole = chance.choice(sound)
        return whole[: chance.randrange(len(whole))]
    if kind == 2:  # of an excessive length
        return MAGIC + bytes([chance.randrange(20)]) + struct.pack("=Q", chance.choice([2**63, 2**64 - 1, 2**40]))
    if kind == 3:  # with a flipped bit
        whole = bytearray(chance.choice(sound))
        whole[chance.randrange(len(whole))] ^= 1 << chance.randrange(8)
        return bytes(whole)
    if kind == 4:
        return b"[" * 5000 + b"\n"
    if kind == 5:
        return b"PUT /" + b"x" * 20000
    return b""
