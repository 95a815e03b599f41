"""Calls of Horovod's operations: checked, submitted, waited for, and differentiated."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from hvd_trainer.hvd.common import basics
from hvd_trainer.hvd.common.controller import Controller
from hvd_trainer.hvd.common.process_sets import ProcessSet
from hvd_trainer.hvd.common.request import DTYPES, REDUCIBLE, Kind, Op, Request, Signature
from hvd_trainer.utils import accelerator

CPU = torch.device("cpu")
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Operation:
    """An operation that was submitted.

    Args:
        splits_on: alltoall: the device for the numbers of received rows.
    """

    def __init__(self, request: Request, controller: Controller, splits_on: torch.device) -> None:
        self.request, self._controller, self._splits_on = request, controller, splits_on

    def is_done(self) -> bool:
        """Return whether `result` would return at once."""
        request = self.request
        return request.is_done and (request.finished is None or request.finished.is_reached())

    def outputs(self) -> tuple[Tensor, ...]:
        """Wait, and return all outputs; on a GPU, let the current stream wait.

        Raises:
            HorovodInternalError: the operation has failed.
        """
        request = self.request
        self._controller.wait(request)
        if request.error is not None:
            raise request.error
        if request.finished is not None:
            request.finished.block()
            stream = torch.accelerator.current_stream(request.tensors[0].device)
            for tensor in (*request.outputs, *request.tensors):
                tensor.record_stream(stream)
        if request.signature.kind == Kind.ALLTOALL:
            received = torch.tensor(request.result, dtype=torch.int32, device=self._splits_on)
            return request.outputs[0], received
        return tuple(request.outputs)

    def result(self) -> Any:
        """Wait as `outputs` does, and return the one tensor of an operation that is no group."""
        outputs = self.outputs()
        if self.request.signature.is_group or len(outputs) > 1:
            return outputs
        return outputs[0] if outputs else None


handles: dict[int, Operation] = {}
"""Operations that nobody has waited for yet, by the numbers that asynchronous functions return."""
_numbers = itertools.count()


class Collective:
    """One call of an operation, checked, and not submitted yet.

    Args:
        kind: of the operation.
        tensors: contiguous, on one device.
        name: by which ranks match it; None: by the number of such operations before.
        process_set: the ranks that take part.
        number: of a name that several operations have at once.
        splits_on: as for `Operation`.
        fields: further fields of `Signature`.

    Raises:
        ValueError: a tensor's type or layout is not supported, or there is none.
    """

    def __init__(
        self,
        kind: str,
        tensors: Sequence[Tensor],
        name: str | None,
        process_set: ProcessSet,
        *,
        number: int = 0,
        splits_on: torch.device = CPU,
        **fields: Any,
    ) -> None:
        if not tensors and kind != Kind.BARRIER:
            raise ValueError("A grouped operation needs at least one tensor.")
        types = REDUCIBLE if kind in (Kind.ALLREDUCE, Kind.REDUCESCATTER) else DTYPE_NAMES
        for tensor in tensors:
            if tensor.dtype not in types or tensor.is_sparse:
                raise ValueError(f"Tensor type {tensor.type()} is not supported.")
            if kind in (Kind.ALLGATHER, Kind.REDUCESCATTER):
                check_has_rows(kind, tensor)
            if not tensor.is_contiguous():
                raise ValueError("Tensor is required to be contiguous.")
            if tensor.device != tensors[0].device:
                raise ValueError("The tensors of one operation must be on one device.")
        self.tensors, self.process_set = tensors, process_set
        self._is_named, self._number, self._splits_on = name is not None, number, splits_on
        self._signature = Signature(
            kind=kind,
            name=f"{kind}.{'noname' if name is None else name}",
            dtypes=tuple(DTYPE_NAMES[tensor.dtype] for tensor in tensors),
            shapes=tuple(tuple(tensor.shape) for tensor in tensors),
            device=tensors[0].device.type if tensors else "",
            **fields,
        )

    def submit(self, *, in_place: bool = False, will_wait: bool = False, waits_soon: bool = False) -> Operation:
        """Ask the process set for the operation.

        Args:
            in_place: whether the results go into the tensors.
            will_wait, waits_soon: the caller asks for the result at once, or soon.

        Raises:
            ValueError: this process is not in the set, or an operation of this name is under way.
            HorovodInternalError: not initialised, or the job has ended.
        """
        controller = controller_of(self.process_set)
        number = self._number if self._is_named else controller.next_number(self._signature.kind)
        request = Request(self._signature, number=number, tensors=self.tensors, in_place=in_place)
        if self.tensors and not accelerator.is_host(self.tensors[0].device):
            request.ready = accelerator.Point(self.tensors[0].device)
        controller.submit(request, will_wait=will_wait, waits_soon=waits_soon)
        return Operation(request, controller, self._splits_on)

    def start(self, *, in_place: bool = False) -> int:
        """Submit it, and return a handle for `poll` and `synchronize`, which waits and returns the outputs."""
        operation, handle = self.submit(in_place=in_place), next(_numbers)
        handles[handle] = operation
        return handle

    def start_(self) -> int:
        """Do as `start`; the outputs are the given tensors, overwritten."""
        return self.start(in_place=True)

    def outputs(self) -> tuple[Tensor, ...]:
        """Submit it, wait, and return new tensors. Differentiable."""
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.tensors):
            outputs: tuple[Tensor, ...] = HorovodFunction.apply(self, *self.tensors)
            return outputs
        return self.submit(will_wait=True).outputs()

    def outputs_(self) -> tuple[Tensor, ...]:
        """Submit it, wait, and return the given tensors, overwritten."""
        return self.submit(in_place=True, will_wait=True).outputs()


def controller_of(process_set: ProcessSet) -> Controller:
    """Return the controller of a process set.

    Raises:
        ValueError: the set is not registered, or this process is not in it.
        HorovodInternalError: `init` has not been called.
    """
    if process_set.process_set_id is None:
        raise ValueError(f"This process set is not registered: {process_set}")
    return basics.controller(process_set.process_set_id)


def check_has_rows(kind: str, tensor: Tensor) -> None:
    """Refuse a tensor without dimensions.

    Raises:
        ValueError: it has none.
    """
    if tensor.dim() == 0:
        raise ValueError(f"{kind.capitalize()} does not support scalar inputs: give the tensor one dimension.")


class HorovodFunction(Function):
    """An operation whose gradients are computed by one of `GRADIENTS`."""

    @staticmethod
    def forward(ctx: Any, collective: Collective, *tensors: Tensor) -> tuple[Tensor, ...]:  # noqa: D102
        operation = collective.submit(will_wait=True)
        outputs = operation.outputs()
        request = operation.request
        ctx.signature, ctx.result, ctx.process_set = request.signature, request.result, collective.process_set
        ctx.mark_non_differentiable(*outputs[len(tensors) :])
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # noqa: D102
        received = [grad.contiguous() for grad in grads[: len(ctx.signature.shapes)]]
        return None, *GRADIENTS[ctx.signature.kind](ctx, received)


def _of_allreduce(forward: Any, grads: list[Tensor]) -> Sequence[Tensor]:
    """Return the gradients reduced as the tensors were."""
    fields = {name: getattr(forward.signature, name) for name in ("op", "prescale", "postscale", "is_group")}
    return Collective(Kind.ALLREDUCE, grads, None, forward.process_set, **fields).outputs()


def _of_allgather(forward: Any, grads: list[Tensor]) -> Sequence[Tensor]:
    """Return this rank's rows of the averaged gradients."""
    started = [
        Collective(Kind.ALLREDUCE, [grad], None, forward.process_set, op=Op.AVERAGE).submit() for grad in grads
    ]
    me = forward.process_set.rank()
    return [work.result().split(lengths)[me] for work, lengths in zip(started, forward.result, strict=True)]


def _of_broadcast(forward: Any, grads: list[Tensor]) -> Sequence[Tensor]:
    """Return the averaged gradient on the root, and zeros elsewhere."""
    reduced = Collective(Kind.ALLREDUCE, grads, None, forward.process_set, op=Op.AVERAGE).outputs()[0]
    return [reduced if basics.rank() == forward.signature.root else torch.zeros_like(reduced)]


def _of_alltoall(forward: Any, grads: list[Tensor]) -> Sequence[Tensor]:
    """Return the gradient to where the rows came from; that of rows that were sent to nobody is zero."""
    rows = Collective(Kind.ALLTOALL, grads, None, forward.process_set, splits=tuple(forward.result)).outputs()[0]
    length, *others = forward.signature.shapes[0]
    return [torch.cat([rows, rows.new_zeros(length - len(rows), *others)]) if len(rows) < length else rows]


def _of_reducescatter(forward: Any, grads: list[Tensor]) -> Sequence[Tensor]:
    """Return the gathered gradients, scaled as the tensors were."""
    signature, process_set = forward.signature, forward.process_set
    factor = (
        signature.prescale * signature.postscale * ((process_set.size() or 1) if signature.op == Op.SUM else 1)
    )
    return Collective(
        Kind.ALLGATHER, [grad * factor for grad in grads], None, process_set, is_group=True
    ).outputs()


GRADIENTS: dict[str, Callable[[Any, list[Tensor]], Sequence[Tensor]]] = {
    Kind.ALLREDUCE: _of_allreduce,
    Kind.ALLGATHER: _of_allgather,
    Kind.BROADCAST: _of_broadcast,
    Kind.ALLTOALL: _of_alltoall,
    Kind.REDUCESCATTER: _of_reducescatter,
}
"""By the kind of an operation: computes the gradients of its inputs, from those of its outputs."""
