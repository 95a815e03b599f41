"""Messages between the monitors of rank 0 and of the other ranks; msgspec checks what arrives against these types.

to rank 0       Hello, then Alive, RankEnded, Stacks, Done
from rank 0     Alive, StacksRequest, JobEnded, Bye
"""

from __future__ import annotations

from msgspec import Struct

from hvd_trainer.faults.root_cause import Event, Heartbeat, RootCause


class _Message(Struct, kw_only=True, tag_field="kind", tag=str.lower):
    """A JSON object whose `kind` is the class's name in lower case."""


class Hello(_Message):
    """The first message of a rank, which authenticates it."""

    token: str
    rank: int


class Alive(_Message):
    """Shows that the sender is alive."""

    heartbeat: Heartbeat | None = None
    """None from rank 0, whose monitor decides"""


class RankEnded(_Message):
    """The training on this rank has ended before its time, or is about to."""

    event: Event
    is_users: bool = False
    """whether it is a user's mistake, which all ranks find alike"""
    heartbeat: Heartbeat | None = None


class StacksRequest(_Message):
    """Asks for the stacks of the receiver, and of silent ranks on its machine."""

    silent: tuple[int, ...]


class Stacks(_Message):
    """The Python stacks of a rank."""

    rank: int
    text: str


class JobEnded(_Message):
    """The job ends; all ranks exit."""

    cause: RootCause
    exit_in_s: float


class Done(_Message):
    """This rank has come to its end, and waits for the others' or disconnects."""


class Bye(_Message):
    """Rank 0 disconnects because the job is over."""


Message = Hello | Alive | RankEnded | StacksRequest | Stacks | JobEnded | Done | Bye
