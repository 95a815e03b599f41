"""A slow cable between two network interfaces: a rate, and a delay each way, made here.

    python slow_cable.py IN OUT --mbit 100 --delay-ms 10

`tc netem` does this in kernels that have it; this needs raw sockets only. What comes in at one end is sent at the
other once the cable has been free for as long as its bytes take, and the delay is over:

    sent at = max(arrived, cable free) + bytes / rate + delay

Packets are as large as the network card would get them (64 kB): they carry the header by which Linux leaves
cutting and sums to the card.
"""

from __future__ import annotations

import argparse
import selectors
import socket
import sys
import time
from collections import deque

SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 263, 15, 23
ALL = 0x0003
LARGEST = 70_000
QUEUE_S = 1.0
"""What waits longer for the cable to be free is dropped, as by a switch whose buffer is full."""


class Direction:
    """One way through the cable."""

    def __init__(self, source: socket.socket, target: socket.socket, bytes_per_s: float, delay_s: float) -> None:
        self._source, self._target = source, target
        self._bytes_per_s, self._delay_s = bytes_per_s, delay_s
        self._free = 0.0
        self._under_way: deque[tuple[float, bytes]] = deque()

    def take(self) -> None:
        """All that has arrived goes under way."""
        while True:
            try:
                packet = self._source.recv(LARGEST)
            except BlockingIOError:
                return
            now = time.monotonic()
            if self._free - now > QUEUE_S:
                continue
            self._free = max(now, self._free) + len(packet) / self._bytes_per_s
            self._under_way.append((self._free + self._delay_s, packet))

    def hand_over(self) -> float | None:
        """Sends what is due, and says in how many seconds the next is; None if nothing is under way."""
        while self._under_way:
            due, packet = self._under_way[0]
            left = due - time.monotonic()
            if left > 0:
                return left
            self._under_way.popleft()
            try:
                self._target.send(packet)
            except OSError as error:
                # An interface that is down, or whose queue is full, loses packets, too.
                print(f"slow_cable: {error}", file=sys.stderr)
        return None


def open_end(interface: str) -> socket.socket:
    """All that arrives at an interface, and a way to send from it."""
    end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ALL))
    end.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    end.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
    end.bind((interface, 0))
    end.setblocking(False)
    return end


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("ends", nargs=2)
    parser.add_argument("--mbit", type=float, required=True)
    parser.add_argument("--delay-ms", type=float, default=0.0)
    options = parser.parse_args()
    one, other = map(open_end, options.ends)
    speed = (options.mbit * 1e6 / 8, options.delay_ms / 1e3)
    ways = {one: Direction(one, other, *speed), other: Direction(other, one, *speed)}
    print("ready", flush=True)
    with selectors.DefaultSelector() as selector:
        for end in ways:
            selector.register(end, selectors.EVENT_READ)
        while True:
            due = [left for way in ways.values() if (left := way.hand_over()) is not None]
            for key, _ in selector.select(min(due, default=None)):
                ways[key.fileobj].take()  # type: ignore[index]


if __name__ == "__main__":
    main()
