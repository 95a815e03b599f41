"""Alltoall: rows of each rank's tensor for each other rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from hvd_trainer.hvd.common import basics
from hvd_trainer.hvd.common.process_sets import ProcessSet, global_process_set
from hvd_trainer.hvd.common.request import ALLTOALL
from hvd_trainer.hvd.operations.handles import Operation, handles, submit

Splits = Tensor | Sequence[int] | None


def _submit(tensor: Tensor, splits: Splits, name: str | None, process_set: ProcessSet, **how: Any) -> Operation:
    size = process_set.size() or basics.size()
    like = splits if isinstance(splits, Tensor) else torch.empty(0, dtype=torch.int32)
    return submit(
        ALLTOALL,
        [tensor],
        name,
        process_set,
        splits=_numbers_of_rows(tensor, splits, size),
        received_splits=like,
        **how,
    )


def _numbers_of_rows(tensor: Tensor, splits: Splits, size: int) -> tuple[int, ...]:
    """Return how many rows go to each rank.

    Raises:
        ValueError: they do not fit the tensor or the number of ranks.
    """
    if tensor.dim() == 0:
        raise ValueError("Alltoall does not support scalar inputs: give the tensor one dimension.")
    if splits is None or len(splits) == 0:
        if len(tensor) % size:
            raise ValueError(
                f"splits not provided, but the first dimension of the tensor, {len(tensor)}, is not a multiple of "
                f"the number of ranks, {size}."
            )
        return (len(tensor) // size,) * size
    if isinstance(splits, Tensor):
        if splits.dim() != 1 or splits.dtype != torch.int32:
            raise ValueError("alltoall expects splits to be a one-dimensional tensor of 32-bit integers.")
        splits = splits.tolist()
    rows = tuple(int(count) for count in splits)
    if len(rows) != size:
        raise ValueError(f"alltoall expects splits to have {size} entries, one per rank, not {len(rows)}.")
    if min(rows) < 0 or sum(rows) > len(tensor):
        raise ValueError(f"The splits {list(rows)} do not fit a tensor whose first dimension is {len(tensor)}.")
    return rows


def alltoall_async(
    tensor: Tensor, splits: Splits = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start to send rows to all ranks; see `alltoall`.

    Returns:
        A handle for `poll` and `synchronize`, which returns the received rows and how many came from each rank.
    """
    return handles.add(_submit(tensor, splits, name, process_set))


class HorovodAlltoall(Function):
    """Alltoall whose gradient goes back to where the rows came from."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, splits: Splits, name: str | None, process_set: ProcessSet) -> Any:  # noqa: D102
        operation = _submit(tensor, splits, name, process_set, will_wait=True)
        output, received_splits = operation.result()
        ctx.process_set, ctx.received, ctx.shape = process_set, operation.request.result, tensor.shape
        if splits is None:
            return output
        ctx.mark_non_differentiable(received_splits)
        return output, received_splits

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # noqa: D102
        rows, _ = alltoall(grads[0].contiguous(), splits=ctx.received, process_set=ctx.process_set)
        if len(rows) < ctx.shape[0]:  # rows that were sent to nobody
            rows = torch.cat([rows, rows.new_zeros(ctx.shape[0] - len(rows), *ctx.shape[1:])])
        return rows, None, None, None


def alltoall(
    tensor: Tensor, splits: Splits = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Send consecutive rows of a tensor to each rank, and return those received, in rank order. Differentiable.

    Args:
        tensor: contiguous, with at least one dimension; all but the first are the same on all ranks.
        splits: how many rows go to each rank (int32 if a tensor); None: the same number to each.
        name: as in `allreduce`.
        process_set: the ranks that take part.

    Returns:
        The received rows; if `splits` is given, also how many came from each rank.

    Raises:
        HorovodInternalError: ranks asked for different things under this name, a rank has joined or is gone.
        ValueError: as in `allreduce`, or the splits do not fit.
    """
    return HorovodAlltoall.apply(tensor, splits, name, process_set)
