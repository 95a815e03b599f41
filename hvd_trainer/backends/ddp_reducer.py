"""Gradients of one stage, averaged among its replicas on torch.distributed while the pipeline still runs."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hvd_trainer.backends.buckets import Bucket
from hvd_trainer.backends.reducer import BucketReducer

WIRE_FORMATS = {"none": None, "fp16": torch.float16, "bf16": torch.bfloat16}


class DDPStageReducer(BucketReducer):
    """Send each bucket when the last micro-batch has added its gradients.

    DDP's own reducer takes one forward and one backward at a time, and a pipeline has several of them under way.

    Args:
        stage: whose gradients are averaged.
        group: the ranks that have this stage; None: all ranks.
        num_ranks: how many they are.
        limit_bytes: a bucket is closed when it has reached this size.
        compression: a name in `WIRE_FORMATS`.
        passes: backward passes of a step.
    """

    def __init__(
        self,
        stage: nn.Module,
        group: dist.ProcessGroup | None,
        *,
        num_ranks: int,
        limit_bytes: int,
        compression: str,
        passes: int,
    ) -> None:
        super().__init__(stage, num_ranks=num_ranks, limit_bytes=limit_bytes, reorder=True, passes=passes)
        self._group, self._wire_format = group, WIRE_FORMATS[compression]
        self._sent: list[tuple[Any, Bucket, Tensor]] = []

    def _send(self, bucket: Bucket) -> None:
        wire = bucket.flat if self._wire_format is None else bucket.flat.to(self._wire_format)
        self._sent.append((dist.all_reduce(wire, group=self._group, async_op=True), bucket, wire))

    def _receive(self) -> None:
        for work, bucket, wire in self._sent:
            work.wait()
            if wire is not bucket.flat:
                bucket.flat.copy_(wire)
        self._sent = []
