"""Gradients of an optimizer in buckets, each of which is one operation of a process set.

agree     before the first exchange, ranks agree on the buckets: parameters in reverse order, as far as they fit
add       in a later step, a gradient is finished; a bucket that is full is reduced while `backward` runs
finish    the rest is reduced, whatever is missing as zeros, and the results are copied to the gradients

A ring all-reduce adds the parts of a buffer in an order of ranks that depends on their place in it. So the layout
of the buckets depends on the parameters alone, and no bucket travels together with anything else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from hvd_trainer.backends.buckets import Bucket, BucketExchange, GradientBuckets, assign
from hvd_trainer.hvd.collective import Collective, Operation
from hvd_trainer.hvd.common.controller import Controller
from hvd_trainer.hvd.common.process_sets import ProcessSet
from hvd_trainer.hvd.common.request import DTYPES, Kind, Op, Request, Signature
from hvd_trainer.hvd.compression import Compressor

BUCKET_BYTES = 25 * 2**20
"""DDP's default."""
MAX_SENT_BYTES = 2**20
"""Where each member sends all others together no more than this, a bucket travels with its request."""


class _Gradient(msgspec.Struct, frozen=True, array_like=True):
    """Name, type and layout of one gradient, the same on all ranks."""

    name: str
    dtype: str
    """on the wire"""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """of the parameter, in whose memory order the gradient travels"""


_Layout = tuple[tuple[_Gradient, ...], ...]
"""The gradients in each bucket."""


class _Proposal(msgspec.Struct, frozen=True, array_like=True):
    """Buckets that a member proposes, and its sparse gradients."""

    buckets: _Layout
    """of those that are dense, or not there"""
    sparse: dict[str, int]
    """in how many dimensions each of the others is sparse"""


@dataclass(frozen=True, kw_only=True)
class Reduction:
    """How gradients are combined: multiplied, reduced, multiplied again."""

    op: int
    factor_before: float
    factor_after: float
    compression: type[Compressor]
    """one of those of `Compression`"""


class NegotiatedBuckets(BucketExchange):
    """Buckets that are reduced by operations which all members have asked for.

    So all that a process set exchanges on a device is queued by one thread at a time, on one communicator, in one
    order on all members. NCCL's operations wait for each other in a circle if members queue them in another order.

    Args:
        names: of the buckets, the same on all members.
        number: of this agreement, the same on all members. So optimizers may have parameters of the same names.
    """

    in_order = False

    def __init__(
        self,
        process_set: ProcessSet,
        controller: Controller,
        buckets: Sequence[Bucket],
        names: Sequence[str],
        number: int,
        op: int,
    ) -> None:
        op = Op.SUM if op == Op.AVERAGE else op
        # With HOROVOD_FUSION_THRESHOLD=0 a bucket is an all-reduce of its own, and adds values up as Horovod's.
        limit = min(MAX_SENT_BYTES // (len(controller.ranks) - 1), controller.settings.fusion_bytes)
        self._collectives = [
            Collective(
                Kind.ALLREDUCE,
                [bucket.flat],
                f"bucket.{name}",
                process_set,
                number=number,
                op=op,
                is_bucket=True,
                inline_limit=limit,
            )
            for bucket, name in zip(buckets, names, strict=True)
        ]
        self._controller, self._num_joins = controller, controller.num_joins
        self._launched: dict[int, Operation] = {}

    @property
    def is_over(self) -> bool:
        """Whether operations have ended, or all members have joined: some of them may not know these buckets."""
        return self._controller.ended is not None or self._controller.num_joins != self._num_joins

    def launch(self, bucket: Bucket) -> None:
        # Nothing of `backward` is left to overlap with the last one: to wake the thread costs more than it gains.
        is_last = len(self._launched) == len(self._collectives) - 1
        self._launched[bucket.number] = self._collectives[bucket.number].submit(in_place=True, waits_soon=is_last)

    def wait(self, bucket: Bucket) -> None:
        self._launched.pop(bucket.number).outputs()


def agree(
    process_set: ProcessSet,
    controller: Controller,
    groups: Sequence[Sequence[Tensor]],
    sparse: Mapping[Tensor, int],
    names: Mapping[Tensor, str],
    reduction: Reduction,
) -> tuple[GradientBuckets | None, dict[Tensor, int], int]:
    """Agree with the other members of a process set on which gradients are sparse, and on buckets for the others.

    A collective.

    Args:
        controller: of the process set.
        groups: the parameters that may share a bucket, in the order in which `backward` is expected to reach them.
        sparse: in how many dimensions the gradients of other parameters are sparse on this rank.
        names: of all parameters of the optimizer.

    Returns:
        The buckets, those of the first member, or None if ranks have different gradients; in how many dimensions
        each gradient is sparse that is so on some rank; and this agreement's number, the same on all members.

    Raises:
        HorovodInternalError: operations have ended.
    """
    fusion_bytes = controller.settings.fusion_bytes
    limits = [min(dist._DEFAULT_FIRST_BUCKET_BYTES, fusion_bytes), min(BUCKET_BYTES, fusion_bytes)]
    parts = [[group[i] for i in part] for group in groups for part in assign(group, limits, range(len(group)))]
    proposal = _Proposal(
        tuple(tuple(_described(gradient, names[gradient], reduction) for gradient in part) for part in parts),
        {names[parameter]: dims for parameter, dims in sparse.items()},
    )
    parameters = {name: parameter for parameter, name in names.items()}
    signature = Signature(
        kind=Kind.GRADIENTS,
        name=f"{Kind.GRADIENTS}.{min(parameters)}",
        details=msgspec.msgpack.encode(proposal),
    )
    number, layout, agreed = controller.run(Request(signature, action=partial(_agreed, controller)))
    agreed_sparse = {parameters[name]: dims for name, dims in agreed.items()}
    if layout is None:
        return None, agreed_sparse, number
    buckets = [
        Bucket.of([parameters[gradient.name] for gradient in bucket], i, DTYPES[bucket[0].dtype])
        for i, bucket in enumerate(layout)
    ]
    exchange = NegotiatedBuckets(
        process_set, controller, buckets, [bucket[0].name for bucket in layout], number, reduction.op
    )
    reduced = GradientBuckets(
        buckets, exchange, factor_before=reduction.factor_before, factor_after=reduction.factor_after
    )
    return reduced, agreed_sparse, number


def _agreed(
    controller: Controller, signatures: Sequence[Signature | None]
) -> tuple[int, _Layout | None, dict[str, int]]:
    """Return a number, the first member's layout without what is sparse, and that, of all that have not joined.

    Without a layout if they have different gradients.
    """
    number = controller.next_number(Kind.GRADIENTS)  # in an order that is the same on all members
    proposals = [msgspec.msgpack.decode(s.details, type=_Proposal) for s in signatures if s is not None]
    sparse: dict[str, int] = {}
    for proposal in proposals:
        for name, dims in proposal.sparse.items():
            sparse[name] = max(dims, sparse.get(name, 0))
    layouts = [
        [tuple(gradient for gradient in bucket if gradient.name not in sparse) for bucket in proposal.buckets]
        for proposal in proposals
    ]
    described = [{gradient for bucket in layout for gradient in bucket} for layout in layouts]
    if any(other != described[0] for other in described):
        return number, None, sparse
    return number, tuple(filter(None, layouts[0])), sparse


def _described(parameter: Tensor, name: str, reduction: Reduction) -> _Gradient:
    wire, _ = reduction.compression.compress(torch.empty(0, dtype=parameter.dtype))
    return _Gradient(name, str(wire.dtype).removeprefix("torch."), tuple(parameter.shape), parameter.stride())
