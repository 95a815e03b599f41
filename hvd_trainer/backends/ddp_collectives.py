"""Collectives, and the exchange of gradients in buckets, by torch.distributed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hvd_trainer.backends.buckets import Bucket, BucketExchange
from hvd_trainer.backends.collectives import Collectives, ReduceOp
from hvd_trainer.backends.session import Session

OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
WIRE_FORMATS = {"none": None, "fp16": torch.float16, "bf16": torch.bfloat16}


class DDPCollectives(Collectives):
    """Collectives on torch.distributed.

    Attributes:
        process_group: all ranks; None: the default group.
        replica_process_group: the ranks of this one's replica group; None: as `process_group`.
    """

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self.process_group: dist.ProcessGroup | None = None
        self.replica_process_group: dist.ProcessGroup | None = None

    @property
    def replicas(self) -> dist.ProcessGroup | None:
        """The group that exchanges gradients; None: the default group."""
        return self.replica_process_group or self.process_group

    def broadcast_to_replicas(self, pairs: Sequence[tuple[Tensor, int]]) -> None:
        started: list[Any] = []
        for tensor, rank in pairs:
            self._keep_alive(tensor)
            started.append(dist.broadcast(tensor, src=rank, group=self.replicas, async_op=True))
        for work in started:
            work.wait()

    def _all_reduce(self, tensor: Tensor, op: ReduceOp, *, replicas: bool = False) -> Tensor:
        result = tensor.detach().clone()
        self._keep_alive(result)
        dist.all_reduce(result, OPS[op], group=self.replicas if replicas else self.process_group)
        return result

    def _all_gather(self, tensor: Tensor) -> list[Tensor]:
        gathered = [torch.empty_like(tensor) for _ in range(self.world.size)]
        self._keep_alive(tensor, *gathered)
        dist.all_gather(gathered, tensor, group=self.process_group)
        return gathered

    def _all_to_all(self, rows: Tensor) -> Tensor:
        sent = rows.contiguous()
        received = torch.empty_like(sent)
        self._keep_alive(sent, received)
        dist.all_to_all_single(received, sent, group=self.process_group)
        return received

    def _broadcast(self, tensor: Tensor, source: int) -> None:
        self._keep_alive(tensor)
        dist.broadcast(tensor, src=source, group=self.process_group)


class DDPBucketExchange(BucketExchange):
    """Sum buckets of a stage's gradients over the ranks of a process group.

    DDP's own reducer takes one forward and one backward at a time, and a pipeline has several of them under way.

    Args:
        group: the ranks; None: all ranks.
        compression: a name in `WIRE_FORMATS`.
    """

    def __init__(self, group: dist.ProcessGroup | None, compression: str) -> None:
        self._group, self._wire_format = group, WIRE_FORMATS[compression]
        self._launched: dict[int, tuple[Any, Tensor]] = {}

    def launch(self, bucket: Bucket) -> None:
        wire = bucket.flat if self._wire_format is None else bucket.flat.to(self._wire_format)
        self._launched[bucket.number] = dist.all_reduce(wire, group=self._group, async_op=True), wire

    def wait(self, bucket: Bucket) -> None:
        work, wire = self._launched.pop(bucket.number)
        work.wait()
        if wire is not bucket.flat:
            bucket.flat.copy_(wire)
