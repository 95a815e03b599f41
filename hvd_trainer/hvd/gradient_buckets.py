"""Gradients of an optimizer in buckets, which go out while `backward` runs without asking the other ranks.

propose   after a step whose gradients went one by one, ranks agree on buckets: those of the first member, who
          forms them as DDP does, in the order in which its `backward` finished the gradients
add       in a later step, a gradient is finished; a bucket that is full is reduced after those before it
finish    the rest is reduced, whatever is missing as zeros, and the results are copied to the gradients
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from hvd_trainer.backends.buckets import Bucket, BucketExchange, GradientBuckets, assign
from hvd_trainer.hvd.collective import Collective, Operation
from hvd_trainer.hvd.common.bucket_schedule import BucketSize
from hvd_trainer.hvd.common.controller import Controller
from hvd_trainer.hvd.common.executor import GROUP_OPS
from hvd_trainer.hvd.common.process_sets import ProcessSet
from hvd_trainer.hvd.common.request import DTYPES, Kind, Op, Request, Signature
from hvd_trainer.hvd.compression import Compressor
from hvd_trainer.utils import accelerator

BUCKET_BYTES = 25 * 2**20
"""DDP's default."""


class _Gradient(msgspec.Struct, frozen=True, array_like=True):
    """Name, type and layout of one gradient, the same on all ranks."""

    name: str
    dtype: str
    """on the wire"""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """of the parameter, in whose memory order the gradient travels"""


class _Proposal(msgspec.Struct, frozen=True, array_like=True):
    """Message in which a rank proposes buckets to the others."""

    buckets: tuple[tuple[_Gradient, ...], ...]
    released: tuple[int, ...]
    """numbers of schedules that this rank needs no more"""


@dataclass(frozen=True, kw_only=True)
class Reduction:
    """How gradients are combined: multiplied, reduced, multiplied again."""

    op: int
    factor_before: float
    factor_after: float
    compression: type[Compressor]
    """one of those of `Compression`"""


class NegotiatedBuckets(BucketExchange):
    """Buckets on accelerators, each reduced by an operation that all members have asked for.

    So all that a process set exchanges on a device is queued by one thread at a time, on one communicator, in one
    order on all members. NCCL's operations wait for each other in a circle if members queue them in another order.

    Args:
        names: of the buckets, the same on all members.
    """

    def __init__(self, process_set: ProcessSet, controller: Controller, names: Sequence[str], op: int) -> None:
        self._process_set, self._controller, self._names = process_set, controller, names
        self._op = Op.SUM if op == Op.AVERAGE else op
        self._launched: dict[int, Operation] = {}

    @property
    def is_over(self) -> bool:
        """Whether operations have ended."""
        return self._controller.ended is not None

    def launch(self, bucket: Bucket) -> None:
        name = self._names[bucket.number]
        asked = Collective(Kind.ALLREDUCE, [bucket.flat], name, self._process_set, op=self._op)
        self._launched[bucket.number] = asked.submit(in_place=True)

    def wait(self, bucket: Bucket) -> None:
        self._launched.pop(bucket.number).outputs()


def propose(
    process_set: ProcessSet,
    controller: Controller,
    groups: Sequence[Sequence[Tensor]],
    names: Mapping[Tensor, str],
    reduction: Reduction,
) -> Request:
    """Ask the other members of a process set to reduce gradients in buckets from now on.

    Args:
        controller: of the process set.
        groups: the parameters that may share a bucket, in the order in which their gradients get finished.

    Returns:
        The request; once done, its result is the buckets, or None: ranks have different ones, or one has joined.
    """
    fusion_bytes = controller.settings.fusion_bytes
    limits = [min(dist._DEFAULT_FIRST_BUCKET_BYTES, fusion_bytes), min(BUCKET_BYTES, fusion_bytes)]
    parts = [[group[i] for i in part] for group in groups for part in assign(group, limits, range(len(group)))]
    proposal = _Proposal(
        buckets=tuple(
            tuple(_described(gradient, names[gradient], reduction) for gradient in part) for part in parts
        ),
        released=tuple(controller.schedules.released),
    )
    parameters = {names[parameter]: parameter for group in groups for parameter in group}

    def act(signatures: Sequence[Signature | None]) -> GradientBuckets | None:
        proposals = [msgspec.msgpack.decode(s.details, type=_Proposal) for s in signatures if s is not None]
        if len(proposals) < len(signatures):
            return None
        controller.schedules.close_released(set.intersection(*(set(proposal.released) for proposal in proposals)))
        described = [{gradient for bucket in proposal.buckets for gradient in bucket} for proposal in proposals]
        if any(other != described[0] for other in described):
            return None
        buckets = [
            Bucket.of([parameters[gradient.name] for gradient in bucket], number, DTYPES[bucket[0].dtype])
            for number, bucket in enumerate(proposals[0].buckets)
        ]
        on_host = all(accelerator.is_host(bucket.flat.device) for bucket in buckets)
        exchange: BucketExchange
        if on_host:
            sizes = [BucketSize(len(bucket.flat), bucket.flat.dtype) for bucket in buckets]
            all_names = [f"allreduce.{gradient.name}" for bucket in proposals[0].buckets for gradient in bucket]
            exchange = schedule = controller.schedules.open(sizes, all_names, GROUP_OPS[reduction.op])
        else:
            firsts = [f"bucket.{bucket[0].name}" for bucket in proposals[0].buckets]
            exchange = NegotiatedBuckets(process_set, controller, firsts, reduction.op)
        before, after = reduction.factor_before, reduction.factor_after
        result = GradientBuckets(buckets, exchange, factor_before=before, factor_after=after)
        if on_host:
            weakref.finalize(result, controller.schedules.release, schedule.number)
        return result

    signature = Signature(
        kind=Kind.ADD_BUCKETS,
        name=f"{Kind.ADD_BUCKETS}.{min(parameters)}",
        details=msgspec.msgpack.encode(proposal),
    )
    request = Request(signature, number=controller.next_number(signature.name), action=act)
    controller.submit(request)
    return request


def _described(parameter: Tensor, name: str, reduction: Reduction) -> _Gradient:
    wire, _ = reduction.compression.compress(torch.empty(0, dtype=parameter.dtype))
    return _Gradient(name, str(wire.dtype).removeprefix("torch."), tuple(parameter.shape), parameter.stride())
