"""Allreduce: of one tensor, of a group, of a sparse one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from hvd_trainer.hvd.common import basics
from hvd_trainer.hvd.common.exceptions import HorovodInternalError
from hvd_trainer.hvd.common.process_sets import ProcessSet, global_process_set
from hvd_trainer.hvd.common.request import ADASUM, ALLREDUCE, AVERAGE, PRODUCT, REDUCIBLE, SUM
from hvd_trainer.hvd.common.util import get_average_backwards_compatibility_fun, num_rank_is_power_2
from hvd_trainer.hvd.compression import Compression, Compressor
from hvd_trainer.hvd.operations.allgather import allgather_async
from hvd_trainer.hvd.operations.handles import Operation, handles, submit, synchronize


class _ReduceOps:
    Average, Sum = AVERAGE, SUM


handle_average_backwards_compatibility = get_average_backwards_compatibility_fun(_ReduceOps)


def _submit(
    tensors: Sequence[Tensor],
    name: str | None,
    op: int,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
    **how: Any,
) -> Operation:
    for tensor in tensors:
        if tensor.dtype not in REDUCIBLE:
            raise ValueError(f"Tensor type {tensor.type()} is not supported.")
    if not AVERAGE <= op <= PRODUCT:
        raise HorovodInternalError(f"There is no reduction {op!r}: use hvd.Sum, hvd.Average and the like.")
    if op == ADASUM:
        _check_adasum(tensors, process_set)
    return submit(
        ALLREDUCE,
        tensors,
        name,
        process_set,
        op=op,
        prescale=float(prescale_factor),
        postscale=float(postscale_factor),
        **how,
    )


def _check_adasum(tensors: Sequence[Tensor], process_set: ProcessSet) -> None:
    if process_set is not global_process_set:
        raise NotImplementedError("Adasum works on all ranks: process sets are not supported.")
    if not num_rank_is_power_2(basics.size()):
        raise NotImplementedError(f"Adasum needs a power of two as number of ranks, not {basics.size()}.")
    if not all(tensor.is_floating_point() for tensor in tensors):
        raise ValueError("Adasum is for floating-point tensors.")


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start to combine a tensor over ranks into a new one; see `allreduce`.

    Returns:
        A handle for `poll` and `synchronize`, which returns the result.
    """
    op = handle_average_backwards_compatibility(op, average)
    return handles.add(_submit([tensor], name, op, prescale_factor, postscale_factor, process_set))


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start to combine a tensor over ranks in place; see `allreduce`.

    Returns:
        A handle for `poll` and `synchronize`, which returns the tensor.
    """
    op = handle_average_backwards_compatibility(op, average)
    return handles.add(_submit([tensor], name, op, prescale_factor, postscale_factor, process_set, in_place=True))


class HorovodGroupedAllreduce(Function):
    """Allreduce whose gradients are the allreduce of the gradients."""

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any,
        is_group: bool,
        op: int,
        name: str | None,
        prescale_factor: float,
        postscale_factor: float,
        process_set: ProcessSet,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.arguments = is_group, op, None, prescale_factor, postscale_factor, process_set
        outputs = _submit(
            tensors,
            name,
            op,
            prescale_factor,
            postscale_factor,
            process_set,
            is_group=is_group,
            will_wait=True,
        ).result()
        return outputs if is_group else (outputs,)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # noqa: D102
        reduced = HorovodGroupedAllreduce.apply(*ctx.arguments, *(grad.contiguous() for grad in grads))
        return None, None, None, None, None, None, *reduced


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Return a tensor combined over ranks: a new one, of the same shape and type. Differentiable.

    Args:
        tensor: contiguous, of the same shape and type on all ranks.
        average: deprecated, use `op`.
        name: by which ranks match the operation, in whatever order they ask for it; None: by its number among
            those without a name.
        compression: type on the wire.
        op: Average (the default), Sum, Adasum, Min, Max or Product.
        prescale_factor: multiplied before.
        postscale_factor: multiplied after.
        process_set: the ranks that take part.

    Raises:
        HorovodInternalError: ranks asked for different things under this name, or a rank is gone.
        ValueError: the tensor's type is not supported, it is not contiguous, or the name is in use.
    """
    op = handle_average_backwards_compatibility(op, average)
    wire, ctx = compression.compress(tensor)
    if wire.requires_grad and torch.is_grad_enabled():
        result: Tensor = HorovodGroupedAllreduce.apply(
            False, op, name, prescale_factor, postscale_factor, process_set, wire
        )[0]
    else:
        result = _submit([wire], name, op, prescale_factor, postscale_factor, process_set, will_wait=True).result()
    return compression.decompress(result, ctx)


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Combine a tensor over ranks in place, and return it; see `allreduce`."""
    op = handle_average_backwards_compatibility(op, average)
    result: Tensor = _submit(
        [tensor], name, op, prescale_factor, postscale_factor, process_set, in_place=True, will_wait=True
    ).result()
    return result


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start to combine several tensors over ranks into new ones, as one operation; see `allreduce`.

    Returns:
        A handle for `poll` and `synchronize`, which returns a tuple of tensors.
    """
    op = handle_average_backwards_compatibility(op, average)
    return handles.add(
        _submit(_group(tensors), name, op, prescale_factor, postscale_factor, process_set, is_group=True)
    )


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start to combine several tensors over ranks in place, as one operation; see `allreduce`.

    Returns:
        A handle for `poll` and `synchronize`, which returns a tuple of the tensors.
    """
    op = handle_average_backwards_compatibility(op, average)
    operation = _submit(
        _group(tensors), name, op, prescale_factor, postscale_factor, process_set, is_group=True, in_place=True
    )
    return handles.add(operation)


def _group(tensors: Sequence[Tensor]) -> list[Tensor]:
    if not tensors:
        raise ValueError("A grouped operation needs at least one tensor.")
    return list(tensors)


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Return several tensors combined over ranks, as one operation; see `allreduce`. Differentiable."""
    op = handle_average_backwards_compatibility(op, average)
    wires, contexts = zip(*[compression.compress(tensor) for tensor in _group(tensors)], strict=True)
    results = HorovodGroupedAllreduce.apply(True, op, name, prescale_factor, postscale_factor, process_set, *wires)
    return [compression.decompress(tensor, ctx) for tensor, ctx in zip(results, contexts, strict=True)]


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> tuple[Tensor, ...]:
    """Combine several tensors over ranks in place, as one operation, and return them; see `allreduce`."""
    handle = grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor, process_set)
    results: tuple[Tensor, ...] = synchronize(handle)
    return results


def sparse_allreduce_async(
    tensor: Tensor, name: str, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Start to add up a sparse COO tensor over ranks: indices and values of all ranks are gathered.

    Args:
        op: Average, or Sum.

    Returns:
        A function that waits and returns the sparse tensor, not coalesced.
    """
    # Gathered along the first dimension, so the indices have to be rows.
    indices_handle = allgather_async(
        tensor._indices().transpose(0, 1).contiguous(), name=f"{name}.indices", process_set=process_set
    )
    values_handle = allgather_async(tensor._values(), name=f"{name}.values", process_set=process_set)

    def wait() -> Tensor:
        values, indices = synchronize(values_handle), synchronize(indices_handle)
        if op == AVERAGE:
            values = values / process_set.size()
        return torch.sparse_coo_tensor(indices.transpose(0, 1), values, tensor.size())

    return wait
