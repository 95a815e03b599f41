"""Two ways to exchange gradients by `hvd.DistributedOptimizer`: in buckets laid out as DDP's, or Horovod's own."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from hvd_trainer.backends.buckets import Bucket, GradientBuckets
from hvd_trainer.backends.same_model import parameters_of

SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 50e-6, 200e-6
_NUMBERS = itertools.count()


class Waiter:
    """Waits for Horovod's operations without holding the CPU, and not for ever.

    Horovod's own wait spins, so that with more ranks than cores it takes the time that it waits for, and it has
    no limit: its stall check neither warned nor ended anything when a rank was stuck.
    """

    def __init__(self, hvd: ModuleType, timeout_s: float) -> None:
        self._hvd, self._timeout_s = hvd, timeout_s

    def result(self, handle: int) -> Any:
        """Waits for an operation and returns its result.

        Raises:
            TimeoutError: as `wait`.
        """
        self.wait(handle)
        return self._hvd.synchronize(handle)

    def wait(self, handle: int) -> None:
        """Waits for an operation, and leaves its result to whoever asks for it next.

        Raises:
            TimeoutError: the other ranks did not take part in time.
        """
        poll, pause = self._hvd.poll, SHORTEST_PAUSE_S
        deadline = time.monotonic() + self._timeout_s
        while not poll(handle):
            time.sleep(pause)
            pause = min(1.25 * pause, LONGEST_PAUSE_S)
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"The other ranks did not take part in an exchange within {self._timeout_s:g} s: one of them "
                    f"is stuck, or much slower. If that is meant, raise --startup-timeout-s"
                )


class BucketExchange:
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


class WrappedExchange:
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


Exchange = BucketExchange | WrappedExchange


def used_somewhere(all_reduce_max: Any, optimizer: Optimizer) -> list[tuple[Tensor, bool]]:
    """Each parameter, and whether any rank has a gradient for it. A collective."""
    parameters = list(parameters_of(optimizer))
    mine = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32)
    return list(zip(parameters, map(bool, all_reduce_max(mine).tolist()), strict=True))
