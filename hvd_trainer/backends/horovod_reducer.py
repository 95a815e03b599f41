"""Two ways to exchange gradients by `hvd.DistributedOptimizer`: in buckets laid out as DDP's, or Horovod's own.

With HOROVOD_ENABLE_ASYNC_COMPLETION a handle on an accelerator is done as soon as NCCL has the operation in its
queue, and nothing here waits for the device. Why what follows may be queued at once (lines of Horovod v0.28.1):

- Before a handle is done, the device's default stream is made to wait for an event after the operation:
  torch/mpi_ops_v2.cc:99-109 (all-reduce), :201-218 (groups), :325-331 (all-gather), :556-563 (broadcast), :635-647
  (all-to-all); the event is recorded at common/ops/gpu_operations.cc:114. The callback's thread has no stream of
  its own, so that `GetGPUStream` gives it the default one. So all that reads a result (decompression, a copy, the
  optimizer, tree sums) must be queued on the default stream, or on one that waits for that, after `wait`.
- The next gradients are written into a bucket on the same stream, thus after the operation; and NCCL's stream
  waits for the event that the next call records (torch/ready_event.cc:56, common/ops/nccl_operations.cc:180).
- `.grad.set_` in `synchronize` (torch/optimizer.py:299) changes what the tensor refers to, not memory.
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
import time
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from hvd_trainer.backends.buckets import Bucket, GradientBuckets
from hvd_trainer.utils.tensors import parameters_of

SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 50e-6, 200e-6
SPIN_S = 50e-6
"""How long a wait asks without a pause where that is worth a core: a sleep takes the system 50 us more than asked
for, and on an accelerator the next step's first operations wait for it."""
_NUMBERS = itertools.count()


class Waiter:
    """Waits for Horovod's operations without holding the CPU, and not for ever.

    Horovod's own wait spins, so that with more ranks than cores it takes the time that it waits for, and it has
    no limit: its stall check neither warned nor ended anything when a rank was stuck.

    Args:
        timeout_s: how long one operation may take.
        spin_s: ask so long without a pause: `SPIN_S` where the work is an accelerator's, 0 on CPUs.
        check: called between two looks at an operation; raises when that cannot end: another rank has failed.
    """

    def __init__(
        self,
        hvd: ModuleType,
        timeout_s: float,
        *,
        spin_s: float = 0.0,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._hvd, self._timeout_s, self._spin_s, self._check = hvd, timeout_s, spin_s, check

    def result(self, handle: int) -> Any:
        """Waits for an operation and returns its result.

        Raises:
            TimeoutError: as `wait`, which also raises what `check` does.
        """
        self.wait(handle)
        return self._hvd.synchronize(handle)

    def wait(self, handle: int) -> None:
        """Waits for an operation, and leaves its result to whoever asks for it next.

        Raises:
            TimeoutError: the other ranks did not take part in time.
            Exception: what `check` raises.
        """
        poll, pause = self._hvd.poll, SHORTEST_PAUSE_S
        began = time.monotonic()
        while not poll(handle):
            waited = time.monotonic() - began
            if waited < self._spin_s:
                continue
            self._check()
            if waited > self._timeout_s:
                raise TimeoutError(
                    f"The other ranks did not take part in an exchange within {self._timeout_s:g} s: one of them "
                    f"is stuck, or much slower. If that is meant, raise --startup-timeout-s"
                )
            time.sleep(pause)
            pause = min(1.25 * pause, LONGEST_PAUSE_S)


class BucketReducer:
    """Sends each bucket as one tensor: nothing to negotiate tensor by tensor, nothing copied to a fusion buffer.

    Horovod's optimizer is given the buckets as its parameters. It compresses, sends and receives them; the
    update is left to the user's own optimizer.
    """

    def __init__(
        self,
        hvd: ModuleType,
        waiter: Waiter,
        model: nn.Module,
        *,
        limit_bytes: int,
        compression: Any,
        reorder: bool,
        process_set: Any,
        passes: int = 1,
    ) -> None:
        self._hvd, self._waiter, self._compression = hvd, waiter, compression
        self._set = process_set
        # Horovod matches tensors of different ranks by name; one that is still on its way may not be reused.
        self._name = f"exchange.{next(_NUMBERS)}"
        parameters = [p for p in model.parameters() if p.requires_grad]
        size = process_set.size()
        self.buckets = GradientBuckets(parameters, limit_bytes, size, self._send, reorder=reorder, passes=passes)
        self._wrap()

    def _wrap(self) -> None:
        self._flats = {id(b): nn.Parameter(b.flat, requires_grad=True) for b in self.buckets.buckets}
        self._wrapped = self._hvd.DistributedOptimizer(
            SGD(self._flats.values(), lr=0.0),
            named_parameters=[(f"{self._name}.bucket.{i}", flat) for i, flat in enumerate(self._flats.values())],
            compression=self._compression,
            op=self._hvd.Sum,
            process_set=self._set,
        )

    def sync(self, enabled: bool) -> None:
        """Whether the next backward passes lead to an exchange."""
        self.buckets.collecting = enabled

    def _send(self, bucket: Bucket) -> None:
        flat = self._flats[id(bucket)]
        # An alias: decompression gives `.grad` another storage, and the bucket must keep its own.
        flat.grad = bucket.flat.view_as(bucket.flat)
        self._wrapped._handles[flat] = self._wrapped._allreduce_grad_async(flat)

    def finish(self) -> None:
        """Waits until every gradient is the mean over ranks."""
        self.buckets.send_rest()
        for handle, _ in self._wrapped._handles.values():
            self._waiter.wait(handle)
        self._wrapped.synchronize()
        for bucket in self.buckets.buckets:
            received = self._flats[id(bucket)].grad
            if received is not None and received.data_ptr() != bucket.flat.data_ptr():
                bucket.flat.copy_(received)  # compression has put the result elsewhere
        if self.buckets.received():
            self._wrap()

    def update(self, optimizer: Optimizer) -> None:
        """The user's own optimizer makes the update."""
        optimizer.step()

    def close(self) -> None:
        self.buckets.remove()


class WrappedReducer:
    """Horovod's own way, tensor by tensor or in its groups: for `num_groups`, Adasum and sparse gradients."""

    def __init__(
        self,
        hvd: ModuleType,
        waiter: Waiter,
        model: nn.Module,
        optimizer: Optimizer,
        settings: Mapping[str, Any],
    ) -> None:
        self._waiter = waiter
        self._adasum = settings.get("op") == hvd.Adasum
        self._wrapped = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), **settings)

    def sync(self, enabled: bool) -> None:
        """Whether the next backward passes lead to an exchange."""
        # Horovod's hooks count down to the exchange: from 2 they never reach it in one pass.
        self._wrapped.set_backward_passes_per_step(1 if enabled else 2)

    def finish(self) -> None:
        """Waits until every gradient is the mean over ranks. Adasum has no such moment: it combines updates."""
        if self._adasum:
            return
        self._send_incomplete_groups()
        for handle, _ in list(self._wrapped._handles.values()):
            if isinstance(handle, int):
                self._waiter.wait(handle)
        self._wrapped.synchronize()

    def _send_incomplete_groups(self) -> None:
        """Sends the groups of which some parameter got no gradient in the last backward pass.

        Horovod would send their members one by one, and wait for ever on the ranks that sent the group.
        """
        wrapped = self._wrapped
        for group in wrapped._group_counts:
            if group not in wrapped._handles:
                for parameter in group:
                    if parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)
                    wrapped._handles.pop(parameter, None)
                wrapped._handles[group] = wrapped._grouped_allreduce_grad_async(group)
                wrapped._group_counts[group] = 0

    def update(self, optimizer: Optimizer) -> None:
        """Steps the user's optimizer; Adasum must step by itself, with that optimizer's state and settings."""
        if self._adasum:
            self._wrapped.state, self._wrapped.param_groups = optimizer.state, optimizer.param_groups
            self._wrapped.step()
        else:
            optimizer.step()

    def close(self) -> None:
        """Nothing to take back: Horovod's hooks go with the wrapper."""


Reducer = BucketReducer | WrappedReducer


def used_somewhere(all_reduce_max: Any, optimizer: Optimizer) -> list[tuple[Tensor, bool]]:
    """Each parameter, and whether any rank has a gradient for it. A collective."""
    parameters = list(parameters_of(optimizer))
    mine = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32)
    return list(zip(parameters, map(bool, all_reduce_max(mine).tolist()), strict=True))
