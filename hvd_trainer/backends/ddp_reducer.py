"""Gradients of one stage, averaged among its replicas on torch.distributed, while the pipeline still runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hvd_trainer.backends.buckets import Bucket, GradientBuckets

FORMATS = {"none": None, "fp16": torch.float16, "bf16": torch.bfloat16}


class GroupReducer:
    """Sends each bucket when the last micro-batch has given its gradients.

    DDP's own reducer takes one forward and one backward at a time, and a pipeline has several of them under way.

    Args:
        group: the ranks that have this stage; None: all have.
        size: how many they are.
        parameters: of this stage.
        limit_bytes: a bucket is closed when it has reached this size.
        compression: a name in `FORMATS`.
        passes: backward passes of a step.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        size: int,
        parameters: Sequence[nn.Parameter],
        *,
        limit_bytes: int,
        compression: str,
        passes: int,
    ) -> None:
        self._group, self._format = group, FORMATS[compression]
        self._sent: list[tuple[Any, Bucket, torch.Tensor]] = []
        self.buckets = GradientBuckets(parameters, limit_bytes, size, self._send, reorder=True, passes=passes)

    def sync(self, enabled: bool) -> None:
        """Whether the next backward passes lead to an exchange."""
        self.buckets.collecting = enabled

    def _send(self, bucket: Bucket) -> None:
        wire = bucket.flat if self._format is None else bucket.flat.to(self._format)
        self._sent.append((dist.all_reduce(wire, group=self._group, async_op=True), bucket, wire))

    def finish(self) -> None:
        """Waits until every gradient is the mean over the group."""
        self.buckets.send_rest()
        for work, bucket, wire in self._sent:
            work.wait()
            if wire is not bucket.flat:
                bucket.flat.copy_(wire)
        self._sent = []
        self.buckets.received()

    def close(self) -> None:
        self.buckets.remove()
