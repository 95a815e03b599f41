"""Messages between the monitors of ranks: typed, and a connection that sends anything else is closed."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest

from hvd_trainer.faults.collectives import CollectiveCall
from hvd_trainer.faults.messages import (
    Alive,
    Bye,
    Channel,
    Done,
    JobEnded,
    Message,
    RankEnded,
    Stacks,
    StacksRequest,
)
from hvd_trainer.faults.monitor import Monitor
from hvd_trainer.faults.root_cause import Event, Heartbeat, RootCause
from hvd_trainer.launch.world import World

BEAT = Heartbeat(step=3, phase="collective", seconds=0.5, is_waiting=True, limit_s=None)
MESSAGES: list[Message] = [
    Alive(),
    Alive(heartbeat=BEAT),
    RankEnded(event=Event("raised", 1, "first\nsecond", "\u2028"), is_users=True, heartbeat=BEAT),
    StacksRequest(silent=(1, 2)),
    Stacks(rank=2, text="Thread 0x1", calls=[CollectiveCall("hvd:0,1", 0, "allreduce.a", False, (0, 1), True)]),
    JobEnded(cause=RootCause(1, "failure: rank 1", reported=True), exit_in_s=0.2),
    Done(rank=1, where=" in train.py, line 3", calls=[CollectiveCall("gloo:0", 7, "", True)]),
    Bye(),
]


@pytest.fixture
def ends() -> Iterator[tuple[Channel, socket.socket]]:
    ours, theirs = socket.socketpair()
    with closing(Channel(ours)) as channel, closing(theirs):
        yield channel, theirs


def test_messages_arrive_as_they_were_sent(ends: tuple[Channel, socket.socket]) -> None:
    receiving, theirs = ends
    sending = Channel(theirs)
    for message in MESSAGES:
        sending.send(message)
    assert receiving.receive() == MESSAGES


def test_a_message_may_arrive_in_pieces(ends: tuple[Channel, socket.socket]) -> None:
    channel, theirs = ends
    theirs.sendall(b'{"kind":"by')
    assert channel.receive() == []
    theirs.sendall(b'e"}\n{"kind":"done"')
    assert channel.receive() == [Bye()]


@pytest.mark.parametrize(
    "line",
    [
        "{}",
        "[" * 100_000,
        json.dumps({"kind": "quit"}),
        json.dumps({"kind": "stacks", "rank": True, "text": ""}),
        json.dumps({"kind": "alive", "heartbeat": {"seconds": float("nan")}}),
        json.dumps({"kind": "rankended", "event": {"kind": "gone", "rank": 1}}),
        json.dumps({"kind": "jobended", "cause": {"rank": 1}, "exit_in_s": 1}),
    ],
)
def test_anything_else_breaks_the_connection(line: str, ends: tuple[Channel, socket.socket]) -> None:
    """It once was a KeyError in the monitor's thread, and training went on without a monitor."""
    channel, theirs = ends
    theirs.sendall(line.encode() + b"\n")
    received: Any = []
    while received == []:
        received = channel.receive()
    assert received is None


def test_an_error_with_bytes_of_a_file_name_is_sent(ends: tuple[Channel, socket.socket]) -> None:
    """What Python makes of a name that is no UTF-8 cannot be encoded as it is."""
    receiving, theirs = ends
    activity = SimpleNamespace(in_collective=False)
    rank: Any = SimpleNamespace(world=World(1, 2, 1, 2), activity=activity, own_heartbeat=Heartbeat)
    Channel(theirs).send(Monitor._describe_error(rank, OSError("no such file: caf\udce9")))
    match receiving.receive():
        case [RankEnded(event=event)]:
            assert "caf\\udce9" in event.text + event.detail
        case other:
            raise AssertionError(other)
