"""Collectives besides the exchange of gradients: reductions, and values that ranks send each other.

    header     the value without its tensors, and type and shape of each; the tensors too, if all are small
    pieces     the contents of the tensors, one piece after the other, each into its place (utils/pieces.py)

Anybody on the network may have sent what arrives: nothing but plain values and tensors is made of it.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, TypeVar

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from hvd_trainer.backends.session import Session
from hvd_trainer.errors import BackendError, first_line
from hvd_trainer.launch.world import World
from hvd_trainer.utils import accelerator
from hvd_trainer.utils.files import UNREADABLE
from hvd_trainer.utils.pieces import as_tensor, move_bytes, move_in_pieces
from hvd_trainer.utils.serialization import describe, empty, flatten, pack_tree, unflatten, unpack_tree
from hvd_trainer.utils.tensors import pairwise_sum

MAX_GATHER_BYTES = 2**20
"""Up to this total size `tree_sum` gathers whole tensors: one exchange is quicker than two of slices."""

MAX_HEADER_TENSORS_BYTES = 2**16
"""Up to this total size the tensors of a value are sent in its header: one exchange less."""

MAX_ELEMENTS = 2**26
"""Of a tensor in one exchange: Horovod counts all ranks' elements in an int, and of gathered ones the bytes."""

ReduceOp = Literal["sum", "max", "min"]
T = TypeVar("T")


class Collectives(ABC):
    """The collectives of an engine that has started. All ranks must call them, in the same order."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._kept_alive: deque[list[Tensor]] = deque(maxlen=4)

    @property
    def world(self) -> World:
        """This process among all."""
        return self._session.world

    def _waiting(self) -> AbstractContextManager[None]:
        """Return a context in which the monitor sees that this rank waits for others."""
        return self._session.activity.waiting()

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum", *, replicas: bool = False) -> Tensor:
        """Combine a tensor (any shape, same on all ranks) over ranks into a new tensor, equal on all ranks.

        Args:
            replicas: over this rank's replica group instead of all ranks.
        """
        with self._waiting():
            return self._all_reduce(tensor, op, replicas=replicas)

    def all_reduce_numbers(self, values: Sequence[float], op: ReduceOp = "sum") -> list[float]:
        """Combine numbers over ranks: host to host, whatever the device is doing."""
        with self._waiting():
            numbers: list[float] = self._all_reduce(torch.tensor(values, dtype=torch.float64), op).tolist()
            return numbers

    def all_gather_object(self, value: T) -> list[T]:
        """Collect one value from each rank: a list in rank order, on all ranks; tensors on the host.

        Args:
            value: plain values and tensors, as for `utils.serialization.flatten`.

        Raises:
            BackendError: a rank's value consists of others; on all ranks.
        """
        if self.world.size == 1:
            return [value]
        own, tensors = encode_object(value)
        with self._waiting():
            lengths = [int(length) for length in self._all_gather(torch.tensor([len(own)]))]
            # The shorter ones are padded, because all ranks must send tensors of one shape.
            parts = self._all_gather(as_tensor(own.ljust(max(lengths))))
            return [
                self._follow(value, tensors, part[:length], rank)
                for rank, (part, length) in enumerate(zip(parts, lengths, strict=True))
            ]

    def broadcast_object(self, value: T, source: int = 0) -> T:
        """Give one rank's value to all ranks; value and errors as in `all_gather_object`."""
        if self.world.size == 1:
            return value
        payload, tensors = encode_object(value) if self.world.rank == source else (None, [])
        with self._waiting():
            header = move_bytes(payload, functools.partial(self._broadcast, source=source))
            return self._follow(value, tensors, header, source)

    def _follow(self, value: T, tensors: Sequence[Tensor], header: Tensor, source: int) -> T:
        """Send or receive the pieces that follow a rank's header; return its value, on that rank the given one."""
        move = functools.partial(self._broadcast, source=source)
        if self.world.rank == source and tensors:
            move_in_pieces(tensors, move, receives=False)
            return value
        received: T = decode_object(header, move)
        return received

    def broadcast_tensors(self, tensors: Sequence[Tensor]) -> None:
        """Fill contiguous tensors with those of rank 0, in pieces, whatever device they are on."""
        with self._waiting():
            move_in_pieces(tensors, functools.partial(self._broadcast, source=0), receives=not self.world.is_first)

    def tree_sum(self, tensor: Tensor) -> Tensor:
        """Return the ranks' sum of a flat tensor, added in the same order on every engine: a binary tree.

            ((r0 + r1) + (r2 + r3)) + ((r4 + r5) + (r6 + r7))

        The number of ranks must be a power of two. Each rank sums one slice of all ranks' tensors, and then all
        gather the slices: 2(n-1)/n of the tensor's size are sent, as in a ring. Small tensors are gathered whole,
        which sends more and waits only once.
        """
        size = self.world.size
        if size == 1:
            return tensor
        if len(tensor) > MAX_ELEMENTS:
            return torch.cat([self.tree_sum(part) for part in tensor.split(MAX_ELEMENTS)])
        with self._waiting():
            if size == 2 or size * tensor.numel() * tensor.element_size() <= MAX_GATHER_BYTES:
                return pairwise_sum(self._all_gather(tensor))
            length = -(-len(tensor) // size)
            rows = nn.functional.pad(tensor, (0, length * size - len(tensor))).view(size, length)
            own = pairwise_sum(list(self._all_to_all(rows)))
            return torch.cat(self._all_gather(own))[: len(tensor)]

    @abstractmethod
    def broadcast_to_replicas(self, pairs: Sequence[tuple[Tensor, int]]) -> None:
        """Fill contiguous tensors with those of a given rank each, within this rank's replica group.

        All are under way before the first is waited for.

        Args:
            pairs: each tensor with the rank that sends it.
        """

    def barrier(self) -> None:
        """Wait until all ranks have called it and their devices have done what was queued before."""
        with self._waiting():
            accelerator.synchronize(self._session.device)
            self._all_reduce(torch.zeros(1), "sum")

    @abstractmethod
    def _all_reduce(self, tensor: Tensor, op: ReduceOp, *, replicas: bool = False) -> Tensor:
        """Return the tensor combined over all ranks, or over the replica group, on the tensor's device."""

    @abstractmethod
    def _all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the ranks' tensors (any shape, same on all ranks) in rank order."""

    @abstractmethod
    def _broadcast(self, tensor: Tensor, source: int) -> None:
        """Fill a tensor with that of one rank."""

    @abstractmethod
    def _all_to_all(self, rows: Tensor) -> Tensor:
        """Send row i to rank i; return what rank i sent as row i. Both have shape (ranks, n)."""

    def _keep_alive(self, *tensors: Tensor) -> None:
        """Keep references to the CPU tensors of an exchange about to start until four more have started.

        An engine's thread drops its reference to a tensor shortly after the exchange. If only Python's is left,
        that thread must take the GIL, and a fork at that moment, such as that of a DataLoader's worker, makes a
        child that hangs (CPython's issue 112275; Python before 3.10.15, 3.11.10 and 3.12.1). A view holds its base
        from C++, so that no thread of the engine needs the GIL.
        """
        views = [tensor.view_as(tensor) for tensor in tensors if accelerator.is_host(tensor.device)]
        if views:
            self._kept_alive.append(views)


def encode_object(value: Any) -> tuple[bytes, list[Tensor]]:
    """Return the header of a value, and the tensors that follow it in pieces.

    If it cannot be sent, the header is one for which `decode_object` raises on each rank. An error here would end
    this rank alone: the others are on their way into the collective, and would wait in it.
    """
    try:
        tree, tensors = flatten(value)
        if sum(tensor.nbytes for tensor in tensors.values()) <= MAX_HEADER_TENSORS_BYTES:
            return pack_tree({"value": tree, "follow": {}}, tensors), []
        follow = {name: describe(tensor) for name, tensor in tensors.items()}
        return pack_tree({"value": tree, "follow": follow}, {}), list(tensors.values())
    except (TypeError, ValueError) as error:
        return pack_tree({"error": ascii(first_line(error))}, {}), []


def decode_object(header: Tensor, move: Callable[[Tensor], object]) -> Any:
    """Return the value of which `encode_object` has made a header (uint8); its tensors are on the host.

    Args:
        move: fills a piece of the tensors that follow.

    Raises:
        BackendError: it consists of more than plain values, or cannot be read.
    """
    with _refuse_unreadable():
        content, tensors = unpack_tree(header.cpu().numpy().tobytes())
        if "error" in content:
            raise _refused(content["error"])
        following = {name: empty(description) for name, description in content["follow"].items()}
    move_in_pieces([*following.values()], move, receives=True)
    with _refuse_unreadable():
        return unflatten(content["value"], tensors | following)


@contextmanager
def _refuse_unreadable() -> Iterator[None]:
    try:
        yield
    except (*UNREADABLE, SafetensorError) as error:
        raise _refused(f"it cannot be read ({type(error).__name__})") from error


def _refused(reason: str) -> BackendError:
    return BackendError(
        f"A rank has sent a value that ranks do not exchange: {reason}. They exchange numbers, texts, tensors, "
        f"and lists and dicts of them. If the optimizer's settings or a metric hold others, make numbers of them."
    )
