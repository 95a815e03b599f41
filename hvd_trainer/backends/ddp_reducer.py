"""Buckets summed by torch.distributed: gradients of one stage, while the pipeline still runs.

DDP's own reducer takes one forward and one backward at a time, and a pipeline has several of them under way.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hvd_trainer.backends.buckets import Bucket, BucketExchange

WIRE_FORMATS = {"none": None, "fp16": torch.float16, "bf16": torch.bfloat16}


class TorchBucketExchange(BucketExchange):
    """Sum buckets over the ranks of a process group.

    Args:
        group: the ranks; None: all ranks.
        compression: a name in `WIRE_FORMATS`.
    """

    def __init__(self, group: dist.ProcessGroup | None, compression: str) -> None:
        self._group, self._wire_format = group, WIRE_FORMATS[compression]
        self._sent: list[tuple[Any, Bucket, Tensor]] = []

    def send(self, bucket: Bucket) -> None:
        wire = bucket.flat if self._wire_format is None else bucket.flat.to(self._wire_format)
        self._sent.append((dist.all_reduce(wire, group=self._group, async_op=True), bucket, wire))

    def receive(self) -> None:
        for work, bucket, wire in self._sent:
            work.wait()
            if wire is not bucket.flat:
                bucket.flat.copy_(wire)
        self._sent = []
