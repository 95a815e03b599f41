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
from collections.abc import Callable, Mapping
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from hvd_trainer.backends.buckets import Bucket, BucketExchange, Reducer
from hvd_trainer.backends.horovod_waiter import Waiter
from hvd_trainer.backends.sparse_gradients import as_sparse, sparse_dims, start_sum

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
        self._launched: dict[int, tuple[int, Any]] = {}

    def launch(self, bucket: Bucket) -> None:
        wire, context = self._compression.compress(bucket.flat)
        name = f"{self._name}.bucket.{bucket.number}"
        handle = self._hvd.allreduce_async_(wire, name=name, op=self._hvd.Sum, process_set=self._process_set)
        self._launched[bucket.number] = handle, context

    def wait(self, bucket: Bucket) -> None:
        handle, context = self._launched.pop(bucket.number)
        received = self._compression.decompress(self._waiter.result(handle), context)
        if received is not bucket.flat:
            bucket.flat.copy_(received)


class HorovodSparseReducer(Reducer):
    """Average sparse gradients, which no bucket holds, after backward: every rank gathers the rows of all.

    Args:
        sparse: parameters by name.
        dense: averages the gradients of all others.
        agree: returns the maximum of an int32 tensor over ranks, element by element, where a rank may lack a
            gradient that others have; None: no rank does.
    """

    def __init__(
        self,
        hvd: ModuleType,
        waiter: Waiter,
        sparse: Mapping[str, nn.Parameter],
        dense: Reducer,
        agree: Callable[[Tensor], Tensor] | None,
    ) -> None:
        self._hvd, self._waiter, self._sparse, self._dense, self._agree = hvd, waiter, sparse, dense, agree

    def set_enabled(self, enabled: bool) -> None:
        self._dense.set_enabled(enabled)

    def finish(self) -> None:
        layouts = [_layout(parameter) for parameter in self._sparse.values()]
        if self._agree is not None:  # ranks that ask for different operations wait for each other
            layouts = self._agree(torch.tensor(layouts, dtype=torch.int32)).tolist()
        started = [
            self._start(name, parameter, layout)
            for (name, parameter), layout in zip(self._sparse.items(), layouts, strict=True)
            if layout
        ]
        self._dense.finish()
        for store in started:
            store()

    def _start(self, name: str, parameter: nn.Parameter, layout: int) -> Callable[[], None]:
        """Start to average a gradient of the layout that it has on some rank; return what waits and stores it."""
        grad = parameter.grad
        if layout > parameter.dim():
            dense = torch.zeros_like(parameter) if grad is None else grad.to_dense()
            handle = self._hvd.allreduce_async_(dense.contiguous(), name=name, op=self._hvd.Average)
            return lambda: setattr(parameter, "grad", self._waiter.result(handle))
        wait = start_sum(as_sparse(grad, parameter, layout), name, self._gather, self._hvd.size())
        return lambda: setattr(parameter, "grad", wait())

    def _gather(self, part: Tensor, name: str) -> Callable[[], Tensor]:
        return partial(self._waiter.result, self._hvd.allgather_async(part, name=name))

    def close(self) -> None:
        self._dense.close()


def _layout(parameter: nn.Parameter) -> int:
    """Return in how many dimensions the gradient is sparse; one more than it has if it is dense, 0 without one."""
    return 0 if parameter.grad is None else sparse_dims(parameter.grad) or parameter.dim() + 1
