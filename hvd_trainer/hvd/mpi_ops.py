"""`horovod.torch.mpi_ops`: all operations, and this process's place among the ranks.

Each function makes a `Collective` of its arguments, and runs it or starts it, into new tensors or in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hvd_trainer.backends.sparse_gradients import start_sum
from hvd_trainer.hvd.collective import Collective, check_has_rows, handles
from hvd_trainer.hvd.common import basics
from hvd_trainer.hvd.common.basics import *  # noqa: F403
from hvd_trainer.hvd.common.exceptions import HorovodInternalError
from hvd_trainer.hvd.common.horovod_basics import HorovodBasics
from hvd_trainer.hvd.common.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    init,
    remove_process_set,
)
from hvd_trainer.hvd.common.request import Kind, Op
from hvd_trainer.hvd.common.util import get_average_backwards_compatibility_fun, num_rank_is_power_2
from hvd_trainer.hvd.compression import Compression, Compressor
from hvd_trainer.utils import accelerator

__all__ = [
    "Adasum",
    "Average",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "global_process_set",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "handle_average_backwards_compatibility",
    "init",
    "join",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "shutdown",
    "sparse_allreduce_async",
    "synchronize",
    *basics.__all__,
]

Average, Sum, Adasum, Min, Max, Product = Op.AVERAGE, Op.SUM, Op.ADASUM, Op.MIN, Op.MAX, Op.PRODUCT
_basics = HorovodBasics(__file__)


handle_average_backwards_compatibility = get_average_backwards_compatibility_fun(_basics)


def _reduction(
    kind: str,
    tensors: Sequence[Tensor],
    average: bool | None,
    name: str | None,
    op: int | None,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    *,
    is_group: bool = False,
) -> Collective:
    op = handle_average_backwards_compatibility(op, average)
    if kind == Kind.REDUCESCATTER and op not in (Op.AVERAGE, Op.SUM):
        raise HorovodInternalError("Reducescatter is for hvd.Average and hvd.Sum only.")
    if not Op.AVERAGE <= op <= Op.PRODUCT:
        raise HorovodInternalError(f"There is no reduction {op!r}: use hvd.Sum, hvd.Average and the like.")
    if op == Op.ADASUM:
        _check_adasum(tensors, process_set)
    prescale, postscale = float(prescale), float(postscale)
    return Collective(
        kind, list(tensors), name, process_set, op=op, prescale=prescale, postscale=postscale, is_group=is_group
    )


_allreduce = partial(_reduction, Kind.ALLREDUCE)
_grouped_allreduce = partial(_allreduce, is_group=True)
_reducescatter = partial(_reduction, Kind.REDUCESCATTER)
_grouped_reducescatter = partial(_reducescatter, is_group=True)


def _check_adasum(tensors: Sequence[Tensor], process_set: ProcessSet) -> None:
    if process_set is not global_process_set:
        raise NotImplementedError("Adasum works on all ranks: process sets are not supported.")
    if not num_rank_is_power_2(basics.size()):
        raise NotImplementedError(f"Adasum needs a power of two as number of ranks, not {basics.size()}.")
    if not all(tensor.is_floating_point() for tensor in tensors):
        raise ValueError("Adasum is for floating-point tensors.")


# Allreduce.


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
    wire, ctx = compression.compress(tensor)
    reduced = _allreduce([wire], average, name, op, prescale_factor, postscale_factor, process_set)
    return compression.decompress(reduced.outputs()[0], ctx)


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
    return _allreduce([tensor], average, name, op, prescale_factor, postscale_factor, process_set).outputs_()[0]


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start `allreduce`; return a handle for `poll` and `synchronize`."""
    return _allreduce([tensor], average, name, op, prescale_factor, postscale_factor, process_set).start()


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start `allreduce_`; return a handle for `poll` and `synchronize`."""
    return _allreduce([tensor], average, name, op, prescale_factor, postscale_factor, process_set).start_()


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
    pairs = [compression.compress(tensor) for tensor in tensors]
    wires = [wire for wire, _ in pairs]
    reduced = _grouped_allreduce(wires, average, name, op, prescale_factor, postscale_factor, process_set)
    return [compression.decompress(wire, ctx) for wire, (_, ctx) in zip(reduced.outputs(), pairs, strict=True)]


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
    reduced = _grouped_allreduce(tensors, average, name, op, prescale_factor, postscale_factor, process_set)
    return reduced.outputs_()


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start `grouped_allreduce`; return a handle for `poll` and `synchronize`."""
    return _grouped_allreduce(tensors, average, name, op, prescale_factor, postscale_factor, process_set).start()


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start `grouped_allreduce_`; return a handle for `poll` and `synchronize`."""
    return _grouped_allreduce(tensors, average, name, op, prescale_factor, postscale_factor, process_set).start_()


def sparse_allreduce_async(
    tensor: Tensor, name: str, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Start to add up a sparse COO tensor over ranks: indices and values of all ranks are gathered.

    Args:
        op: Average, or Sum.

    Returns:
        A function that waits and returns the sparse tensor, not coalesced.
    """

    def gather(part: Tensor, name: str) -> Callable[[], Tensor]:
        return Collective(Kind.ALLGATHER, [part], name, process_set).submit().result

    return start_sum(tensor, name, gather, (process_set.size() or 1) if op == Op.AVERAGE else 1)


# Allgather.


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """Gather the tensors of all ranks, one after the other along the first dimension. Differentiable.

    Args:
        tensor: contiguous, with at least one dimension; the first may differ from rank to rank.
        name: as in `allreduce`.
        process_set: the ranks that take part.

    Raises:
        HorovodInternalError: ranks asked for different things under this name, a rank has joined or is gone.
        ValueError: as in `allreduce`, or the tensor has no dimension.
    """
    return Collective(Kind.ALLGATHER, [tensor], name, process_set).outputs()[0]


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Start `allgather`; return a handle for `poll` and `synchronize`."""
    return Collective(Kind.ALLGATHER, [tensor], name, process_set).start()


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[Tensor, ...]:
    """Gather several tensors of all ranks, as one operation; see `allgather`. Differentiable."""
    return Collective(Kind.ALLGATHER, list(tensors), name, process_set, is_group=True).outputs()


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start `grouped_allgather`; return a handle for `poll` and `synchronize`."""
    return Collective(Kind.ALLGATHER, list(tensors), name, process_set, is_group=True).start()


# Broadcast.


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Return the tensor of one rank on all. Differentiable.

    Args:
        tensor: contiguous, of the same shape and type on all ranks.
        root_rank: the rank that sends, among all ranks, also in a process set.
        name: as in `allreduce`.
        process_set: the ranks that take part.

    Raises:
        HorovodInternalError: ranks asked for different things under this name, a rank has joined or is gone.
        ValueError: as in `allreduce`, or the root is not in the process set.
    """
    return _broadcast(tensor, root_rank, name, process_set).outputs()[0]


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Overwrite a tensor with that of one rank, and return it; see `broadcast`."""
    return _broadcast(tensor, root_rank, name, process_set).outputs_()[0]


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start `broadcast`; return a handle for `poll` and `synchronize`."""
    return _broadcast(tensor, root_rank, name, process_set).start()


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start `broadcast_`; return a handle for `poll` and `synchronize`."""
    return _broadcast(tensor, root_rank, name, process_set).start_()


def _broadcast(tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet) -> Collective:
    ranks = process_set.ranks if process_set is not global_process_set else range(basics.size())
    if root_rank not in (ranks or ()):
        raise ValueError(f"broadcast received invalid root rank {root_rank}: the process set has ranks {ranks}.")
    return Collective(Kind.BROADCAST, [tensor], name, process_set, root=int(root_rank))


# Alltoall.


def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
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
    outputs = _alltoall(tensor, splits, name, process_set).outputs()
    return outputs[0] if splits is None else outputs


def alltoall_async(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start `alltoall`; return a handle for `poll` and `synchronize`, which returns rows and their numbers."""
    return _alltoall(tensor, splits, name, process_set).start()


def _alltoall(
    tensor: Tensor, splits: Tensor | Sequence[int] | None, name: str | None, process_set: ProcessSet
) -> Collective:
    check_has_rows(Kind.ALLTOALL, tensor)
    size = process_set.size() or basics.size()
    device = splits.device if isinstance(splits, Tensor) else torch.device("cpu")
    rows = _numbers_of_rows(len(tensor), splits, size)
    return Collective(Kind.ALLTOALL, [tensor], name, process_set, splits=rows, splits_on=device)


def _numbers_of_rows(length: int, splits: Tensor | Sequence[int] | None, size: int) -> tuple[int, ...]:
    """Return how many of a tensor's rows go to each rank.

    Raises:
        ValueError: they do not fit the tensor or the number of ranks.
    """
    if splits is None or len(splits) == 0:
        if length % size:
            raise ValueError(
                f"splits not provided, but the first dimension of the tensor, {length}, is not a multiple of "
                f"the number of ranks, {size}."
            )
        return (length // size,) * size
    if isinstance(splits, Tensor):
        if splits.dim() != 1 or splits.dtype != torch.int32:
            raise ValueError("alltoall expects splits to be a one-dimensional tensor of 32-bit integers.")
        splits = splits.tolist()
    rows = tuple(int(count) for count in splits)
    if len(rows) != size:
        raise ValueError(f"alltoall expects splits to have {size} entries, one per rank, not {len(rows)}.")
    if min(rows) < 0 or sum(rows) > length:
        raise ValueError(f"The splits {list(rows)} do not fit a tensor whose first dimension is {length}.")
    return rows


# Reducescatter.


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Op.AVERAGE,
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
    scattered = _reducescatter([wire], None, name, op, prescale_factor, postscale_factor, process_set)
    return compression.decompress(scattered.outputs()[0], ctx)


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: int = Op.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start `reducescatter`; return a handle for `poll` and `synchronize`."""
    return _reducescatter([tensor], None, name, op, prescale_factor, postscale_factor, process_set).start()


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Op.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Combine several tensors over ranks as one operation, and return this rank's rows. Differentiable."""
    pairs = [compression.compress(tensor) for tensor in tensors]
    wires = [wire for wire, _ in pairs]
    scattered = _grouped_reducescatter(wires, None, name, op, prescale_factor, postscale_factor, process_set)
    return [compression.decompress(wire, ctx) for wire, (_, ctx) in zip(scattered.outputs(), pairs, strict=True)]


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: int = Op.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start `grouped_reducescatter`; return a handle for `poll` and `synchronize`."""
    return _grouped_reducescatter(tensors, None, name, op, prescale_factor, postscale_factor, process_set).start()


# Without tensors, and the end.


def poll(handle: int) -> bool:
    """Return whether an operation is done, so that `synchronize` would return at once.

    Raises:
        ValueError: there is no such handle, or `synchronize` was called on it.
    """
    operation = handles.get(handle)
    if operation is None:
        raise ValueError(f"Handle {handle} was not created or has been cleared.")
    return operation.is_done()


def synchronize(handle: int) -> Any:
    """Wait for an operation, and return its output: a tensor, or a tuple of several.

    On a GPU the host does not wait: the current stream does. Returns None for a handle that is unknown or was
    synchronised before.

    Raises:
        HorovodInternalError: the operation has failed.
    """
    operation = handles.pop(handle, None)
    return None if operation is None else operation.result()


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks of a process set have called it.

    Raises:
        HorovodInternalError: not initialised, or the job has ended.
    """
    Collective(Kind.BARRIER, (), None, process_set).submit(will_wait=True).outputs()


def join(device: int = -1) -> int:
    """Take part in the other ranks' allreduces with zeros until all ranks have joined: for uneven data.

    Args:
        device: number of the GPU for the zeros; -1: none, and allreduces of tensors on GPUs raise an error in the
            other ranks.

    Returns:
        The rank that joined last.

    Raises:
        HorovodInternalError: not initialised, or the job has ended.
    """
    kind = accelerator.kind() if device >= 0 else None
    zeros_on = torch.device("cpu") if kind is None else torch.device(kind, device)
    return basics.controller(0).join(zeros_on)


def shutdown() -> None:
    """End the job: waits until all ranks come to it, too; nothing if there is none."""
    basics.shutdown()
    handles.clear()
