"""Allgather: tensors of all ranks, one after the other along the first dimension."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.autograd import Function

from hvd_trainer.hvd.common.process_sets import ProcessSet, global_process_set
from hvd_trainer.hvd.common.request import ALLGATHER, ALLREDUCE, AVERAGE
from hvd_trainer.hvd.operations.handles import Operation, handles, submit


def _submit(tensors: Sequence[Tensor], name: str | None, process_set: ProcessSet, **how: Any) -> Operation:
    if not tensors:
        raise ValueError("A grouped operation needs at least one tensor.")
    if any(tensor.dim() == 0 for tensor in tensors):
        raise ValueError("Allgather does not support scalar inputs: give the tensor one dimension.")
    return submit(ALLGATHER, tensors, name, process_set, **how)


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Start to gather a tensor of all ranks; see `allgather`.

    Returns:
        A handle for `poll` and `synchronize`, which returns the result.
    """
    return handles.add(_submit([tensor], name, process_set))


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start to gather several tensors of all ranks, as one operation; see `allgather`.

    Returns:
        A handle for `poll` and `synchronize`, which returns a tuple of tensors.
    """
    return handles.add(_submit(list(tensors), name, process_set, is_group=True))


class HorovodGroupedAllgather(Function):
    """Gather whose gradient is this rank's rows of the averaged gradient."""

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any, is_group: bool, name: str | None, process_set: ProcessSet, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        operation = _submit(tensors, name, process_set, is_group=is_group, will_wait=True)
        outputs = operation.result()
        ctx.process_set = process_set
        ctx.num_rows = [len(tensor) for tensor in tensors]
        me = process_set.rank()
        ctx.first_rows = [sum(lengths[:me]) for lengths in operation.request.result]
        return outputs if is_group else (outputs,)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # noqa: D102
        started = [submit(ALLREDUCE, [grad.contiguous()], None, ctx.process_set, op=AVERAGE) for grad in grads]
        parts = zip(started, ctx.first_rows, ctx.num_rows, strict=True)
        return None, None, None, *(its.result().narrow(0, first, count) for its, first, count in parts)


def gather_rows(tensor: Tensor, name: str | None) -> tuple[Tensor, list[int]]:
    """Return the tensors of all ranks, one after the other, and how many rows each rank has sent."""
    operation = _submit([tensor], name, global_process_set, will_wait=True)
    return operation.result(), operation.request.result[0]


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """Return the tensors of all ranks, one after the other along the first dimension. Differentiable.

    Args:
        tensor: contiguous, with at least one dimension; the first may differ from rank to rank.
        name: as in `allreduce`.
        process_set: the ranks that take part.

    Raises:
        HorovodInternalError: ranks asked for different things under this name, a rank has joined or is gone.
        ValueError: as in `allreduce`, or the tensor has no dimension.
    """
    output: Tensor = HorovodGroupedAllgather.apply(False, name, process_set, tensor)[0]
    return output


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[Tensor, ...]:
    """Return several tensors of all ranks, as one operation; see `allgather`. Differentiable."""
    outputs: tuple[Tensor, ...] = HorovodGroupedAllgather.apply(True, name, process_set, *tensors)
    return outputs
