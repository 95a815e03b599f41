"""Batches from loader processes, in shared memory that is used again.

For each tensor of each batch PyTorch makes new shared memory, whose pages the kernel has to clear, and passes its
file descriptor through a connection that both sides authenticate. Here a loader process keeps its blocks:

    loader process   find a free block, mark it as taken, write a tensor into it, send the block's number
    rank             return a tensor in this block; when its memory is not referenced any more, mark it as free
"""

from __future__ import annotations

import io
import itertools
import math
import os
import pickle
import secrets
import weakref
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import get_worker_info
from torch.utils.data._utils.collate import collate as collate_by_type
from torch.utils.data._utils.collate import collate_tensor_fn, default_collate_fn_map

MAX_BLOCKS = 64
"""Blocks of a loader process. A tensor that finds none, because its rank keeps batches, is sent as by PyTorch."""


class SharedBatches:
    """Make batches in loader processes and send them in blocks of shared memory; for `DataLoader(collate_fn=)`.

    Args:
        collate: makes a batch from a list of samples; None: PyTorch's default.
    """

    _instances: ClassVar[weakref.WeakValueDictionary[int, SharedBatches]] = weakref.WeakValueDictionary()
    _numbers: ClassVar = itertools.count()

    def __init__(self, collate: Callable[[list[Any]], Any] | None) -> None:
        self._collate, self._number = collate, next(self._numbers)
        self._blocks: _Blocks | None = None
        # By loader process; one that was started again has another token and other blocks.
        self._mapped: dict[int, tuple[str, dict[int, _Mapping]]] = {}
        self._instances[self._number] = self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_mapped": {}}

    def __call__(self, samples: list[Any]) -> Any:
        """Return a batch, in a loader process; it is unpickled as the collated batch."""
        if self._blocks is None:
            worker = get_worker_info()
            assert worker is not None, "for loader processes only"
            self._blocks = _Blocks(self._number, worker.id)
        blocks = self._blocks
        blocks.release_unsent()
        if self._collate is not None:
            return blocks.pack(self._collate(samples))
        return blocks.pack(
            collate_by_type(samples, collate_fn_map={**default_collate_fn_map, Tensor: blocks.stack})
        )

    @classmethod
    def map_block(cls, block: _Block) -> _Mapping:
        """Return a block's memory, in the rank; it is mapped when it comes for the first time."""
        mapped_by = cls._instances[block.owner]._mapped
        token, mapped = mapped_by.get(block.worker, ("", {}))
        if token != block.token:
            mapped = {}
            mapped_by[block.worker] = block.token, mapped
        if block.mapping is not None:
            mapped[block.number] = block.mapping
        return mapped[block.number]


class _Mapping(NamedTuple):
    """A block's memory, and for each block of the same process whether it is taken."""

    memory: Tensor
    taken: Tensor


class _Block(NamedTuple):
    """A block of a loader process, as it is sent to the rank."""

    owner: int
    worker: int
    token: str
    number: int
    mapping: _Mapping | None
    """None: the rank has it already"""


class _Packed(NamedTuple):
    """A batch, pickled with its tensors in blocks."""

    data: bytes

    def __reduce__(self) -> tuple[Any, ...]:
        return pickle.loads, (self.data,)


class _Blocks:
    """The blocks of a loader process."""

    def __init__(self, owner: int, worker: int) -> None:
        self._owner, self._worker, self._token = owner, worker, secrets.token_hex(8)
        self._taken = torch.zeros(MAX_BLOCKS, dtype=torch.uint8).share_memory_()
        self._memory: dict[int, Tensor] = {}
        self._known: set[int] = set()
        """blocks that the rank has mapped"""
        self._unsent: dict[int, int] = {}
        """blocks of the batch that is being made, by the address of their memory"""

    def release_unsent(self) -> None:
        """Free what an error has kept from being sent."""
        for block in self._unsent.values():
            self._taken[block] = 0
        self._unsent.clear()

    def stack(self, tensors: list[Tensor], *, collate_fn_map: Any = None) -> Any:
        """Stack tensors in a block, or as PyTorch does if that is not possible; for its default collate."""
        first = tensors[0]
        shape = torch.Size([len(tensors), *first.shape])
        out = self._allocate(shape, first.dtype) if _is_plain(first) else None
        if out is None:
            return collate_tensor_fn(tensors, collate_fn_map=collate_fn_map)
        return torch.stack(tensors, out=out)

    def pack(self, batch: Any) -> _Packed:
        """Pickle a batch; its tensors are sent in blocks."""
        buffer = io.BytesIO()
        _Pickler(buffer, self).dump(batch)
        return _Packed(buffer.getvalue())

    def block_of(self, tensor: Tensor) -> _Block | None:
        """Return the block in which a tensor is sent, copied there unless it is; None: as PyTorch sends it."""
        if not _is_plain(tensor):
            return None
        if tensor.data_ptr() not in self._unsent:
            if tensor.is_shared() or not tensor.is_contiguous():
                return None
            copied = self._allocate(tensor.shape, tensor.dtype)
            if copied is None:
                return None
            tensor = copied.copy_(tensor)
        number = self._unsent.pop(tensor.data_ptr())
        mapping = None if number in self._known else _Mapping(self._memory[number], self._taken)
        self._known.add(number)
        return _Block(self._owner, self._worker, self._token, number, mapping)

    def _allocate(self, shape: torch.Size, dtype: torch.dtype) -> Tensor | None:
        """Return a tensor in a free block, or in a new one; None if it is empty, or there are too many blocks.

        A block of up to four times the size will do. One that is smaller, by less than that, is replaced, so that
        batches of various lengths need about as many blocks as are on their way at once.
        """
        size = math.prod(shape) * dtype.itemsize
        # All of a block is taken from the machine's shared memory at once: at most a page, or an eighth, too much.
        step = 1 << max(size.bit_length() - 4, 12)
        wanted = -(-size // step) * step
        taken = self._taken.tolist()
        free = {number: len(memory) for number, memory in self._memory.items() if not taken[number]}
        usable = [number for number, length in free.items() if length <= 4 * wanted <= 16 * length]
        number = min(usable, key=lambda n: (free[n] < size, abs(free[n] - size)), default=len(self._memory))
        if not size or number == MAX_BLOCKS:
            return None
        if free.get(number, 0) < size:
            storage = torch.UntypedStorage._new_shared(wanted)
            self._memory[number] = torch.empty(0, dtype=torch.uint8).set_(storage)
            self._known.discard(number)
        self._taken[number] = 1
        memory = self._memory[number]
        self._unsent[memory.data_ptr()] = number
        return memory[:size].view(dtype).view(shape)


class _Pickler(ForkingPickler):
    """Pickles tensors as places in blocks."""

    def __init__(self, buffer: io.BytesIO, blocks: _Blocks) -> None:
        super().__init__(buffer)
        self._blocks = blocks

    def reducer_override(self, value: Any) -> Any:
        block = self._blocks.block_of(value) if type(value) is Tensor else None
        return NotImplemented if block is None else (_tensor_in, (block, value.dtype, value.shape))


def _is_plain(tensor: Tensor) -> bool:
    return (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not (tensor.is_nested or tensor.is_quantized or tensor.requires_grad)
    )


def _tensor_in(block: _Block, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    """Return a tensor in a block, in the rank; the block is free when its memory is not referenced any more."""
    memory, taken = SharedBatches.map_block(block)
    # An array of its own, which the tensor's storage keeps, whatever views are made of the tensor.
    array = memory.numpy()[: math.prod(shape) * dtype.itemsize]
    weakref.finalize(array, _release, taken, block.number, os.getpid()).atexit = False
    return torch.from_numpy(array).view(dtype).view(shape)


def _release(taken: Tensor, block: int, rank: int) -> None:
    # A process that was forked has copies of the rank's tensors, and the rank may still use its own.
    if os.getpid() == rank:
        taken[block] = 0
