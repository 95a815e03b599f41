"""Tensors in the files of a checkpoint, read when there is a place for them: no file is in memory as a whole.

state.safetensors          a   b[0:3]       of rank 0
state-00001.safetensors        b[3:6]   c   a tensor in several files is their rows, one file after the other
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.utils._pytree import tree_map_only

from hvd_trainer.backends.collectives import Collectives
from hvd_trainer.errors import CheckpointError
from hvd_trainer.utils import accelerator
from hvd_trainer.utils.files import open_regular
from hvd_trainer.utils.pieces import PIECE_BYTES
from hvd_trainer.utils.serialization import CODES
from hvd_trainer.utils.tensors import as_bytes, local_rows


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A tensor in a checkpoint's files. It may be permuted and viewed, as `unflatten` does."""

    like: Tensor
    """on the meta device, with its type, shape and strides"""
    places: Sequence[tuple[str, int, int]]
    """file, first byte and number of bytes of its rows, in their order"""

    def permute(self, order: Sequence[int]) -> StoredTensor:
        return replace(self, like=self.like.permute(list(order)))

    def view(self, kind: Any) -> StoredTensor:
        return replace(self, like=self.like.view(kind))

    def read(self, target: Tensor, first: int) -> None:
        """Fill a tensor of bytes (flat, on any device) with those from number `first` on.

        Raises:
            CheckpointError, OSError: they cannot be read.
        """
        for file, offset, length in self.places:
            part, target = target.tensor_split([max(0, min(len(target), length - first))])
            if len(part):
                _read(Path(file), offset + first, part)
            first = max(0, first - length)


AnyTensor = Tensor | StoredTensor


def stored_tensors(files: Iterable[Path]) -> dict[str, StoredTensor]:
    """Return the tensors of a checkpoint by name, given its files in the order of the rows.

    Raises:
        SafetensorError, ValueError, OSError, LookupError: a file cannot be read, or does not fit the others.
    """
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        start, header = _read_header(file)
        for name, entry in header.items():
            shape, dtype, places = entry["shape"], CODES[entry["dtype"]], []
            if name in tensors:
                before, places = tensors[name].like, [*tensors[name].places]
                if [dtype, *shape[1:]] != [before.dtype, *before.shape[1:]] or not shape or not before.dim():
                    raise ValueError(f"{name} has rows of several kinds")
                shape[0] += len(before)
            begin, end = entry["data_offsets"]
            like = torch.empty(shape, dtype=dtype, device="meta")
            tensors[name] = StoredTensor(like, [*places, (str(file), start + begin, end - begin)])
    return tensors


def _read_header(file: Path) -> tuple[int, dict[str, Any]]:
    """Return where the tensors of a safetensors file begin, and its entry for each."""
    with open_regular(file) as opened, safe_open(file, "pt", backend="pread"):  # refuses headers that do not fit
        size = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(size))
    header.pop("__metadata__", None)
    return 8 + size, header


def _read(file: Path, offset: int, target: Tensor) -> None:
    with open_regular(file) as opened:
        opened.seek(offset)
        for piece in target.split(PIECE_BYTES):
            is_here = accelerator.is_host(piece.device)
            on_host = piece if is_here else accelerator.pinned(piece.shape, piece.dtype)
            if opened.readinto(on_host.numpy().data) != len(piece):
                raise CheckpointError(f"{file} is shorter than it was a moment ago")
            if not is_here:
                piece.copy_(on_host)


class StateReader:
    """Fills tensors with those of a checkpoint.

    Args:
        collectives: by which rank 0 sends what it reads for all; None: each rank reads what it needs.
    """

    def __init__(self, collectives: Collectives | None = None) -> None:
        self._collectives = collectives

    def load(self, value: Any) -> Any:
        """Return a nested value with new tensors in host memory. A collective, if rank 0 sends."""
        pairs: list[tuple[AnyTensor, Tensor]] = []

        def allocate(saved: AnyTensor) -> Tensor:
            pairs.append((saved, new_like(saved)))
            return pairs[-1][1]

        loaded = tree_map_only((Tensor, StoredTensor), allocate, value)
        self.fill(pairs)
        return loaded

    def fill(self, pairs: Sequence[tuple[AnyTensor, Tensor]]) -> None:
        """Fill tensors of the same shape each, of a sharded one this rank's rows. A collective, if rank 0 sends.

        Beside them it takes memory for a piece, or for a tensor whose order in memory is another one.
        """
        batch: list[tuple[StoredTensor, Tensor, int, Tensor | None]] = []
        room = PIECE_BYTES
        for saved, target in pairs:
            part, first = local_rows(target.detach())
            if isinstance(saved, Tensor):
                part.copy_(_rows(saved, first, part))
                continue
            is_alike = saved.like.is_contiguous() and part.is_contiguous() and saved.like.dtype == part.dtype
            batch.append((saved, part, first, None if is_alike else new_like(saved)))
            room -= part.nbytes
            if room <= 0:
                self._fill(batch)
                batch, room = [], PIECE_BYTES
        self._fill(batch)

    def _fill(self, batch: Sequence[tuple[StoredTensor, Tensor, int, Tensor | None]]) -> None:
        pieces = [as_bytes(part) if copy is None else _memory_of(copy) for _, part, _, copy in batch]
        if self._collectives is None or self._collectives.world.is_first:
            for piece, (saved, part, first, copy) in zip(pieces, batch, strict=True):
                row = part.nbytes // max(1, len(part)) if part.dim() else 0
                saved.read(piece, first * row if copy is None else 0)
        if self._collectives is not None and pieces:
            self._collectives.broadcast_tensors(pieces)
        for _, part, first, copy in batch:
            if copy is not None:
                part.copy_(_rows(copy, first, part))


def new_like(saved: AnyTensor, parameter: Tensor | None = None) -> Tensor:
    """Return a new tensor for a saved one: sharded and placed as a parameter of its shape, else on the host."""
    like = saved if isinstance(saved, Tensor) else saved.like
    if parameter is not None and like.dim() and like.shape == parameter.shape:
        return torch.empty_like(parameter, dtype=like.dtype, requires_grad=False)
    return torch.empty_strided(like.size(), like.stride(), dtype=like.dtype)


def _memory_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor in their order in memory."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def _rows(whole: Tensor, first: int, target: Tensor) -> Tensor:
    return whole[first : first + len(target)] if target.dim() else whole
