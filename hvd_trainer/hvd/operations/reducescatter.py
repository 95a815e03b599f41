"""Reducescatter: tensors are combined over ranks, and each rank gets some rows of the result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.autograd import Function

from hvd_trainer.hvd.common.exceptions import HorovodInternalError
from hvd_trainer.hvd.common.process_sets import ProcessSet, global_process_set
from hvd_trainer.hvd.common.request import AVERAGE, REDUCESCATTER, REDUCIBLE, SUM
from hvd_trainer.hvd.compression import Compression, Compressor
from hvd_trainer.hvd.operations.allgather import grouped_allgather
from hvd_trainer.hvd.operations.handles import Operation, handles, submit


def _submit(
    tensors: Sequence[Tensor],
    name: str | None,
    op: int,
    process_set: ProcessSet,
    prescale_factor: float,
    postscale_factor: float,
    **how: Any,
) -> Operation:
    if not tensors:
        raise ValueError("A grouped operation needs at least one tensor.")
    for tensor in tensors:
        if tensor.dtype not in REDUCIBLE:
            raise ValueError(f"Tensor type {tensor.type()} is not supported.")
        if tensor.dim() == 0:
            raise ValueError("Reducescatter does not support scalar inputs: give the tensor one dimension.")
    if op not in (AVERAGE, SUM):
        raise HorovodInternalError("Reducescatter is for hvd.Average and hvd.Sum only.")
    return submit(
        REDUCESCATTER,
        tensors,
        name,
        process_set,
        op=op,
        prescale=float(prescale_factor),
        postscale=float(postscale_factor),
        **how,
    )


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: int = AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start to combine a tensor over ranks and share out the rows; see `reducescatter`.

    Returns:
        A handle for `poll` and `synchronize`, which returns this rank's rows.
    """
    return handles.add(_submit([tensor], name, op, process_set, prescale_factor, postscale_factor))


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: int = AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start to combine several tensors and share out the rows, as one operation; see `reducescatter`.

    Returns:
        A handle for `poll` and `synchronize`, which returns a tuple of tensors.
    """
    operation = _submit(list(tensors), name, op, process_set, prescale_factor, postscale_factor, is_group=True)
    return handles.add(operation)


class HorovodGroupedReducescatter(Function):
    """Reducescatter whose gradient is the gathered gradient, scaled alike."""

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any,
        is_group: bool,
        name: str | None,
        op: int,
        process_set: ProcessSet,
        prescale_factor: float,
        postscale_factor: float,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        operation = _submit(
            tensors,
            name,
            op,
            process_set,
            prescale_factor,
            postscale_factor,
            is_group=is_group,
            will_wait=True,
        )
        ctx.process_set = process_set
        ctx.factor = prescale_factor * postscale_factor * ((process_set.size() or 1) if op == SUM else 1)
        outputs = operation.result()
        return outputs if is_group else (outputs,)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # noqa: D102
        scaled = [(grad * ctx.factor).contiguous() for grad in grads]
        return None, None, None, None, None, None, *grouped_allgather(scaled, process_set=ctx.process_set)


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Combine a tensor over ranks, and return this rank's rows of the result. Differentiable.

    The first dimension is divided evenly; the first ranks get one row more where it cannot be.

    Args:
        tensor: contiguous, of the same shape and type on all ranks, with at least one dimension.
        name, compression, process_set, prescale_factor, postscale_factor: as in `allreduce`.
        op: Average or Sum.

    Raises:
        HorovodInternalError: ranks asked for different things under this name, a rank has joined or is gone.
        ValueError: as in `allreduce`, or the tensor has no dimension.
    """
    wire, ctx = compression.compress(tensor)
    outputs = HorovodGroupedReducescatter.apply(
        False, name, op, process_set, prescale_factor, postscale_factor, wire
    )
    return compression.decompress(outputs[0], ctx)


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Combine several tensors over ranks as one operation, and return this rank's rows. Differentiable."""
    pairs = [compression.compress(tensor) for tensor in tensors]
    outputs = HorovodGroupedReducescatter.apply(
        True, name, op, process_set, prescale_factor, postscale_factor, *(wire for wire, _ in pairs)
    )
    return [compression.decompress(output, ctx) for output, (_, ctx) in zip(outputs, pairs, strict=True)]
