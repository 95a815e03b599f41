"""Gradients averaged by Horovod: in buckets laid out as DDP's, and sparse ones by name.

With HOROVOD_ENABLE_ASYNC_COMPLETION a handle on an accelerator is done as soon as NCCL has the operation in its
queue, and nothing here waits for the device. Why what follows may be queued at once (lines of Horovod v0.28.1):

- Before a handle is done, the device's default stream is made to wait for an event after the operation:
  torch/mpi_ops_v2.cc:99-109 (all-reduce), :201-218 (groups), :325-331 (all-gather), :556-563 (broadcast), :635-647
  (all-to-all); the event is recorded at common/ops/gpu_operations.cc:114. The callback's thread has no stream of
  its own, so that `GetGPUStream` gives it the default one. So all that reads a result (decompression, a copy, the
  optimizer, tree sums) must be queued on the default stream, or on one that `follow`s it.
- The next gradients are written into a bucket on the same stream, thus after the operation; and NCCL's stream
  waits for the event that the next call records (torch/ready_event.cc:56, common/ops/nccl_operations.cc:180).
- `.grad.set_` in `synchronize` (torch/optimizer.py:299), of a dense gradient among the sparse ones, changes what
  the tensor refers to, not memory.
- The operation holds its tensors until the default stream waits (gpu_operations.cc:85, :131), and memory that is
  freed is given out again in that stream's order. What an all-gather allocates, NCCL's stream waits for as well
  (nccl_operations.cc:942-953).
- With a timeline the host waits after all (gpu_operations.cc:93), by events that operations record only if it is
  on when they begin: it must be started where no operation is on its way, which is between two steps.
- What happens after the ranks have agreed on an operation, such as an error of NCCL or the end of a rank, is not
  seen here any more, but where the host next waits for the device.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from torch import nn
from torch.optim import SGD

from hvd_trainer.backends.buckets import Bucket, BucketExchange, Reducer
from hvd_trainer.backends.horovod_waiter import Waiter, follow

_NUMBERS = itertools.count()


class HorovodBucketExchange(BucketExchange):
    """Sum each bucket as one tensor: nothing to negotiate tensor by tensor, nothing copied to a fusion buffer.

    Args:
        compression: one of `hvd.Compression`.
        process_set: Horovod's set of the ranks that have the module.
    """

    in_order = False

    def __init__(self, hvd: ModuleType, waiter: Waiter, compression: Any, process_set: Any) -> None:
        self._hvd, self._waiter, self._compression = hvd, waiter, compression
        self._process_set = process_set
        # Horovod matches tensors of different ranks by name; one that is still on its way may not be reused.
        self._name = f"exchange.{next(_NUMBERS)}"
        self._sent: dict[int, tuple[int, Any]] = {}

    def send(self, bucket: Bucket) -> None:
        wire, context = self._compression.compress(bucket.flat)
        name = f"{self._name}.bucket.{bucket.number}"
        handle = self._hvd.allreduce_async_(wire, name=name, op=self._hvd.Sum, process_set=self._process_set)
        self._sent[bucket.number] = handle, context

    def receive(self, bucket: Bucket) -> None:
        handle, context = self._sent.pop(bucket.number)
        received = self._compression.decompress(self._waiter.result(handle), context)
        if received is not bucket.flat:
            bucket.flat.copy_(received)


class HorovodSparseReducer(Reducer):
    """Average sparse gradients, which no bucket holds, by the hooks of `hvd.DistributedOptimizer`.

    Args:
        sparse: parameters by name.
        dense: averages the gradients of all others.
    """

    def __init__(self, hvd: ModuleType, sparse: Mapping[str, nn.Parameter], dense: Reducer) -> None:
        self._parameters, self._dense = [*sparse.values()], dense
        self._wrapped = hvd.DistributedOptimizer(SGD(self._parameters, lr=0.0), named_parameters=sparse.items())

    def set_enabled(self, enabled: bool) -> None:
        self._dense.set_enabled(enabled)
        # Horovod's hooks count down to the exchange: from 2 they never reach it in one pass.
        self._wrapped.set_backward_passes_per_step(1 if enabled else 2)

    def finish(self) -> None:
        self._dense.finish()
        self._wrapped.synchronize()
        follow(self._parameters)

    def close(self) -> None:
        """Stop taking part in backward; Horovod's hooks go with the wrapper."""
        self._dense.close()
