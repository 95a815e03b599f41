"""Giving one rank's parameters, optimizer state or objects to all, and collecting objects of all ranks.

Objects travel by cloudpickle, as in Horovod: a receiver runs what the sender's bytes say. So the network between
the ranks must be one on which only they can answer, as for Horovod itself. Large tensors follow in pieces, without
being pickled.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Mapping
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.storage import TypedStorage
from torch.utils._pytree import tree_leaves, tree_map_only

from hvd_trainer.hvd.collective import Collective
from hvd_trainer.hvd.common import basics
from hvd_trainer.hvd.common.process_sets import ProcessSet, global_process_set
from hvd_trainer.hvd.common.request import Kind
from hvd_trainer.hvd.mpi_ops import broadcast_, broadcast_async_, synchronize
from hvd_trainer.hvd.optimizer import step_on_zeros
from hvd_trainer.utils.optimizer_state import load_in_place
from hvd_trainer.utils.pieces import as_tensor, move_bytes, move_in_pieces
from hvd_trainer.utils.tensors import parameters_of

MIN_BUFFER_BYTES = 2**16
"""From this size on contents of tensors are sent beside the pickle."""


def broadcast_parameters(params: Mapping[str, Tensor] | Iterable[Any], root_rank: int) -> None:
    """Fill tensors with those of one rank.

    Args:
        params: `model.state_dict()`, `model.named_parameters()` or `model.parameters()`; other values than tensors
            are left out.
        root_rank: the rank that sends.

    Raises:
        ValueError: neither a dict nor a list of tensors.
    """
    if isinstance(params, Mapping):
        named = sorted(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, str | Tensor):
        named = [entry if isinstance(entry, tuple) else (None, entry) for entry in params]
    else:
        raise ValueError(f"invalid params of type: {type(params)}")
    handles = []
    for name, tensor in named:
        if not isinstance(tensor, Tensor):
            continue
        packed = tensor.data.contiguous()
        handles.append((tensor, packed, broadcast_async_(packed, root_rank, name)))
    for tensor, packed, handle in handles:
        synchronize(handle)
        if packed.data_ptr() != tensor.data_ptr():
            tensor.data.copy_(packed)


def broadcast_optimizer_state(optimizer: Optimizer, root_rank: int, model: nn.Module | None = None) -> None:
    """Give one rank's optimizer state and settings to all; a fresh optimizer stays fresh, with gradients of zero.

    Horovod takes a step on zero gradients to create the state of a fresh optimizer, after which Adam's first
    update is 0.744 of what it should be, and weight decay has moved the weights (issues 2805 and 3743). With
    `run --exactly-horovod` the same step is taken here.

    Args:
        root_rank: the rank that sends.
        model: for that step, which needs to know of sparse embeddings.
    """
    if basics.runtime().settings.exactly_horovod and not optimizer.state:
        step_on_zeros(optimizer, model)
        if not optimizer.state:
            return  # as Horovod, which then sends no settings either
    is_root = basics.rank() == root_rank
    state: Any = optimizer.state_dict() if is_root else None
    # Without their elements: these follow, without being pickled.
    shapes = tree_map_only(Tensor, lambda leaf: torch.empty(leaf.shape, dtype=leaf.dtype, device="meta"), state)
    shapes = broadcast_object(shapes, root_rank, name="optimizer_state")
    if not is_root:
        state = tree_map_only(Tensor, lambda leaf: torch.empty_like(leaf, device="cpu"), shapes)
    tensors = [leaf.detach().contiguous() for leaf in tree_leaves(state) if isinstance(leaf, Tensor)]
    move_in_pieces(tensors, lambda piece: broadcast_(piece, root_rank, "optimizer_state.p"), receives=not is_root)
    if not is_root:
        load_in_place(optimizer, state)
    if not state["state"]:
        # Scripts written for Horovod find gradients here, which its step has left.
        for parameter in parameters_of(optimizer):
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return one rank's object on all ranks; see the module about whom to trust.

    Args:
        obj: on the root, anything that cloudpickle takes; on other ranks of no account.
        root_rank: the rank that sends, among all ranks.
        name: by which ranks match the operation; None: as in `allreduce`.
        process_set: the ranks that take part.
    """
    is_root = basics.rank() == root_rank
    payload, buffers = _dump(obj) if is_root else (None, [])

    # Not named after the object's type, as in Horovod: other ranks may well pass None.
    def move(part: Tensor) -> None:
        broadcast_(part, root_rank, name, process_set)

    received = move_bytes(payload, move)
    if is_root:
        move_in_pieces(buffers, move, receives=False)
        return obj
    sizes, pickled = cloudpickle.loads(received.numpy())
    buffers = [torch.empty(size, dtype=torch.uint8) for size in sizes]
    move_in_pieces(buffers, move, receives=True)
    return cloudpickle.loads(pickled, buffers=[buffer.numpy() for buffer in buffers])


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Return the objects of all ranks, in rank order, on all ranks; see the module about whom to trust.

    Args:
        obj: anything that cloudpickle takes.
        name: by which ranks match the operation; None: as in `allreduce`.
    """
    payload = as_tensor(cloudpickle.dumps(obj))
    name = None if name is None else f"{name}.t"
    operation = Collective(Kind.ALLGATHER, [payload], name, global_process_set).submit(will_wait=True)
    rows, (lengths,) = operation.result(), operation.request.result
    return [cloudpickle.loads(part.numpy()) for part in rows.split(lengths)]


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # which has no types
    """Gives the contents of the host's tensors to `buffer_callback`, as NumPy's arrays do."""

    def reducer_override(self, obj: Any) -> Any:
        """Return how to pickle an object."""
        if isinstance(obj, TypedStorage) and obj.device.type == "cpu":
            contents: Any = torch.empty(0, dtype=torch.uint8).set_(obj._untyped_storage).numpy()
            return _storage_of, (pickle.PickleBuffer(contents), obj.dtype)
        return super().reducer_override(obj)


def _storage_of(contents: Any, dtype: torch.dtype) -> TypedStorage:
    untyped = torch.frombuffer(contents, dtype=torch.uint8).untyped_storage() if len(contents) else None
    return TypedStorage(wrap_storage=untyped or torch.UntypedStorage(0), dtype=dtype, _internal=True)


def _dump(obj: Any) -> tuple[bytes, list[Tensor]]:
    """Return an object's pickle, and the contents of its large tensors and arrays, which are not in it."""
    file, buffers = io.BytesIO(), []

    def is_inside(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.readonly or raw.nbytes < MIN_BUFFER_BYTES:
            return True
        buffers.append(torch.frombuffer(raw, dtype=torch.uint8))
        return False

    _Pickler(file, protocol=5, buffer_callback=is_inside).dump(obj)
    return cloudpickle.dumps(([len(buffer) for buffer in buffers], file.getvalue())), buffers
