"""Submitting operations, and waiting for them by the handles that Horovod's asynchronous functions return."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from hvd_trainer.hvd.common import basics
from hvd_trainer.hvd.common.controller import Controller
from hvd_trainer.hvd.common.process_sets import ProcessSet
from hvd_trainer.hvd.common.request import ALLTOALL, DTYPES, Request, Signature
from hvd_trainer.utils import accelerator

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Operation:
    """An operation that was submitted.

    Args:
        request: what was submitted.
        controller: to which.
        received_splits: alltoall: an empty tensor like the one to be returned.
    """

    def __init__(self, request: Request, controller: Controller, received_splits: Tensor | None = None) -> None:
        self.request, self._controller, self._received_splits = request, controller, received_splits

    def is_done(self) -> bool:
        """Return whether `result` would return at once."""
        request = self.request
        return request.is_done and (request.finished is None or bool(request.finished.query()))

    def result(self) -> Any:
        """Wait, and return the output: a tensor, or a tuple of a group's; on a GPU, let the current stream wait.

        Raises:
            HorovodInternalError: the operation has failed.
        """
        request = self.request
        self._controller.wait(request)
        if request.error is not None:
            raise request.error
        if request.finished is not None:
            stream = accelerator.current_stream(request.tensors[0].device)
            stream.wait_event(request.finished)
            for output in request.outputs:
                output.record_stream(stream)
        if request.signature.is_group:
            return tuple(request.outputs)
        result = request.outputs[0] if request.outputs else None
        if request.signature.kind == ALLTOALL:
            assert self._received_splits is not None
            return result, self._received_splits.new_tensor(request.result)
        return result


class _Handles:
    """Operations by their handles."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._operations: dict[int, Operation] = {}

    def add(self, operation: Operation) -> int:
        with self._lock:
            handle = next(self._numbers)
            self._operations[handle] = operation
            return handle

    def get(self, handle: int) -> Operation | None:
        return self._operations.get(handle)

    def take(self, handle: int) -> Operation | None:
        return self._operations.pop(handle, None)

    def clear(self) -> None:
        self._operations.clear()


handles = _Handles()


def submit(
    kind: str,
    tensors: Sequence[Tensor],
    name: str | None,
    process_set: ProcessSet,
    *,
    in_place: bool = False,
    will_wait: bool = False,
    received_splits: Tensor | None = None,
    **fields: Any,
) -> Operation:
    """Submit an operation to a process set's controller.

    Args:
        tensors: contiguous, on one device.
        name: by which ranks match it; None: by the number of such operations before.
        in_place: whether the results go into `tensors`.
        will_wait: the caller asks for the result at once.
        received_splits: as for `Operation`.
        fields: further fields of `Signature`.

    Raises:
        ValueError: a tensor's type or layout is not supported, this process is not in the set, or an operation of
            this name is under way.
        HorovodInternalError: not initialised, or the job has ended.
    """
    controller = basics.controller(_set_id(process_set))
    dtypes = []
    for tensor in tensors:
        dtypes.append(_dtype_name(tensor))
        if not tensor.is_contiguous():
            raise ValueError("Tensor is required to be contiguous.")
    number = 0 if name is not None else controller.next_number(kind)
    signature = Signature(
        kind=kind,
        name=f"{kind}.{'noname' if name is None else name}",
        dtypes=tuple(dtypes),
        shapes=tuple(tuple(tensor.shape) for tensor in tensors),
        device=tensors[0].device.type if tensors else "",
        **fields,
    )
    request = Request(signature, number=number, tensors=tensors, in_place=in_place)
    if tensors and not accelerator.is_host(tensors[0].device):
        if any(tensor.device != tensors[0].device for tensor in tensors):
            raise ValueError("The tensors of one operation must be on one device.")
        request.ready = accelerator.event(tensors[0].device)
        request.ready.record(accelerator.current_stream(tensors[0].device))
    controller.submit(request, will_wait=will_wait)
    return Operation(request, controller, received_splits)


def _set_id(process_set: ProcessSet) -> int:
    if process_set.process_set_id is None:
        raise ValueError(f"This process set is not registered: {process_set}")
    return process_set.process_set_id


def _dtype_name(tensor: Tensor) -> str:
    name = DTYPE_NAMES.get(tensor.dtype)
    if name is None or tensor.is_sparse:
        raise ValueError(f"Tensor type {tensor.type()} is not supported.")
    return name


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
    operation = handles.take(handle)
    return None if operation is None else operation.result()
