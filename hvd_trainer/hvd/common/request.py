"""One operation as a rank asks for it, and the description of it that ranks compare."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from hvd_trainer.utils import accelerator

REDUCE_OPS = ("Average", "Sum", "Adasum", "Min", "Max", "Product")
"""Names of the reductions, by Horovod's numbers."""


class Op:
    """Horovod's numbers of the reductions."""

    AVERAGE, SUM, ADASUM, MIN, MAX, PRODUCT = range(6)


class Kind:
    """Kinds of operations."""

    ALLREDUCE, ALLGATHER, BROADCAST, ALLTOALL = "allreduce", "allgather", "broadcast", "alltoall"
    REDUCESCATTER, BARRIER = "reducescatter", "barrier"
    ADD_SET, REMOVE_SET = "add_process_set", "remove_process_set"
    GRADIENTS = "gradients"
    """agree on buckets of gradients"""


NUMBER_BITS = 24
MAX_NUMBER = (1 << NUMBER_BITS) - 1
"""Operations without a name are counted up to this, and then again from 1."""

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    )
}
REDUCIBLE = (torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Types that Horovod's operations with arithmetic take; the others take all of `DTYPES`."""


class Signature(msgspec.Struct, frozen=True, array_like=True):
    """Everything about an operation in which ranks must agree, or which the others must know."""

    kind: str
    name: str
    """as the user gave it; else that of the operation's kind, and the request's number counts them"""
    dtypes: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    device: str = ""
    """type of the tensors' device"""
    op: int = -1
    root: int = -1
    """global rank that sends a broadcast"""
    prescale: float = 1.0
    postscale: float = 1.0
    splits: tuple[int, ...] = ()
    """alltoall: rows for each member of the process set; process sets: their ranks"""
    is_group: bool = False
    """whether a list of tensors was given, even of one"""
    is_bucket: bool = False
    """whether nothing may travel with it: the order of a sum depends on the place in what is exchanged as one"""
    inline_limit: int = 128
    """up to how many bytes the tensor travels with the request, instead of in an exchange of its own"""
    details: bytes = b""
    """in which members may differ; for `Request.action`"""

    @property
    def num_bytes(self) -> int:
        """The size of this rank's tensors."""
        sizes = (DTYPES[dtype].itemsize for dtype in self.dtypes)
        return sum(math.prod(shape) * size for shape, size in zip(self.shapes, sizes, strict=True))

    @property
    def inline_bytes(self) -> int:
        """How many bytes travel with the request; 0 if its tensors need an exchange of their own."""
        if self.device != "cpu" or self.is_group or self.op == Op.ADASUM:
            return 0
        if self.kind not in (Kind.ALLREDUCE, Kind.BROADCAST, Kind.ALLGATHER):
            return 0
        return self.num_bytes if self.num_bytes <= self.inline_limit else 0


class Request:
    """One operation of this rank, from submission to its result.

    Args:
        signature: what is asked for.
        number: of a request without a name of its own, else 0.
        tensors: contiguous.
        in_place: whether the results go into `tensors`.
        action: called once all members have asked, with all members' signatures (None of one that has joined), by
            the thread that drives rounds; returns the result.

    Attributes:
        outputs: the results, once done.
        result: what an operation without tensors returns; alltoall: rows received from each member.
        error: why it has failed; None if it has not.
        is_done: whether outputs or error are there.
        is_awaited, waits_soon: whether a thread waits for them, or will before long.
        ready, finished: points of an accelerator's streams, after which the tensors and the outputs may be read.
        work: what is left of an operation on CPUs that has only been started; `Controller.wait` waits for it.
        submitted_at, began_at: when it was asked for, and when all members had, by `time.monotonic`.
    """

    def __init__(
        self,
        signature: Signature,
        *,
        number: int = 0,
        tensors: Sequence[Tensor] = (),
        in_place: bool = False,
        action: Callable[[Sequence[Signature | None]], Any] | None = None,
    ) -> None:
        self.signature = signature
        self.number = number
        # Without autograd's record: the user's tensors may require gradients.
        self.tensors = [tensor.data for tensor in tensors]
        self.outputs: list[Tensor] = list(tensors) if in_place else []
        self.in_place = in_place
        self.action = action
        self.result: Any = None
        self.error: BaseException | None = None
        self.is_done = self.is_awaited = self.waits_soon = False
        self.ready: accelerator.Point | None = None
        self.finished: accelerator.Point | None = None
        self.work: Any = None
        self.submitted_at = self.began_at = time.monotonic()

    @property
    def device_index(self) -> int:
        """Index of the tensors' device; -1 on a CPU, and without tensors."""
        return self.tensors[0].get_device() if self.tensors else -1

    @property
    def key(self) -> tuple[str, int]:
        """Name and number, by which ranks match the operation."""
        return self.signature.name, self.number

    @property
    def title(self) -> str:
        """Name and number as errors and reports have them."""
        return title_of(self.key)


def title_of(key: tuple[str, int]) -> str:
    """Return name and number of an operation as errors and reports have them."""
    name, number = key
    return f"{name}.{number & MAX_NUMBER}" if number else name
