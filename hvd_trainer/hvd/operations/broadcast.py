"""Broadcast: one rank's tensor on all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from hvd_trainer.hvd.common import basics
from hvd_trainer.hvd.common.process_sets import ProcessSet, global_process_set
from hvd_trainer.hvd.common.request import AVERAGE, BROADCAST
from hvd_trainer.hvd.operations.allreduce import allreduce
from hvd_trainer.hvd.operations.handles import Operation, handles, submit


def _submit(tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet, **how: Any) -> Operation:
    ranks = process_set.ranks if process_set is not global_process_set else range(basics.size())
    if root_rank not in (ranks or ()):
        raise ValueError(f"broadcast received invalid root rank {root_rank}: the process set has ranks {ranks}.")
    return submit(BROADCAST, [tensor], name, process_set, root=int(root_rank), **how)


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start to send one rank's tensor to all, into a new tensor; see `broadcast`.

    Returns:
        A handle for `poll` and `synchronize`, which returns the result.
    """
    return handles.add(_submit(tensor, root_rank, name, process_set))


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start to fill a tensor with that of one rank; see `broadcast`.

    Returns:
        A handle for `poll` and `synchronize`, which returns the tensor.
    """
    return handles.add(_submit(tensor, root_rank, name, process_set, in_place=True))


class HorovodBroadcast(Function):
    """Broadcast whose gradient is the averaged gradient on the root, and zero elsewhere."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet) -> Tensor:  # noqa: D102
        ctx.root_rank, ctx.process_set = root_rank, process_set
        output: Tensor = _submit(tensor, root_rank, name, process_set, will_wait=True).result()
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # noqa: D102
        reduced = allreduce(grads[0].contiguous(), op=AVERAGE, process_set=ctx.process_set)
        return reduced if basics.rank() == ctx.root_rank else torch.zeros_like(reduced), None, None, None


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Return the tensor of one rank: a new one, on all ranks. Differentiable.

    Args:
        tensor: contiguous, of the same shape and type on all ranks.
        root_rank: the rank that sends, among all ranks, also in a process set.
        name: as in `allreduce`.
        process_set: the ranks that take part.

    Raises:
        HorovodInternalError: ranks asked for different things under this name, a rank has joined or is gone.
        ValueError: as in `allreduce`, or the root is not in the process set.
    """
    output: Tensor = HorovodBroadcast.apply(tensor, root_rank, name, process_set)
    return output


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Fill a tensor with that of one rank, and return it; see `broadcast`."""
    result: Tensor = _submit(tensor, root_rank, name, process_set, in_place=True, will_wait=True).result()
    return result
