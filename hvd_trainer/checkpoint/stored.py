"""Tensors in the files of a checkpoint, read when there is a place for them: no file is in memory as a whole.

state.safetensors          a   b[0:3]       of rank 0
state-00001.safetensors        b[3:6]   c   a tensor in several files is their rows, one file after the other
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

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

    name: str
    like: Tensor
    """on the meta device, with its type, shape and strides"""

    def permute(self, order: Sequence[int]) -> StoredTensor:
        return replace(self, like=self.like.permute(order))

    def view(self, kind: Any) -> StoredTensor:
        return replace(self, like=self.like.view(kind))


AnyTensor = Tensor | StoredTensor


class Place(NamedTuple):
    """Where the bytes of a tensor, or of some of its rows, are."""

    file: Path
    offset: int
    bytes: int


class TensorFiles:
    """The tensors in the safetensors files of one checkpoint.

    Args:
        files: in the order of the rows.

    Attributes:
        tensors: by name.

    Raises:
        SafetensorError, ValueError, OSError, LookupError: a file cannot be read, or does not fit the others.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self._places: dict[str, list[Place]] = {}
        self.tensors: dict[str, StoredTensor] = {}
        for file in files:
            for name, (shape, dtype, place) in _read_header(file).items():
                before = self.tensors.get(name)
                if before is not None:
                    rows, *row = before.like.shape
                    if [dtype, *shape[1:]] != [before.like.dtype, *row]:
                        raise ValueError(f"{name} has rows of several kinds")
                    shape[0] += rows
                self.tensors[name] = StoredTensor(name, torch.empty(shape, dtype=dtype, device="meta"))
                self._places.setdefault(name, []).append(place)

    def read(self, name: str, target: Tensor, start: int) -> None:
        """Fill a tensor of bytes (flat, on any device) with those of a stored tensor from number `start` on.

        Raises:
            CheckpointError: the files have fewer.
            OSError: one cannot be read.
        """
        first, left = start, target
        for file, offset, length in self._places[name]:
            part, left = left.split([size := max(0, min(len(left), length - first)), len(left) - size])
            if size:
                _read(file, offset + first, part)
            first = max(0, first - length)
        if len(left):
            raise CheckpointError(f"{name} in {self._places[name][0].file.parent} has too few bytes")


def _read_header(file: Path) -> dict[str, tuple[list[int], torch.dtype, Place]]:
    """Return shape, type and place of each tensor in a safetensors file."""
    with open_regular(file), safe_open(file, "pt", backend="pread"):
        pass  # which refuses all headers that do not fit the file
    with open_regular(file) as opened:
        size = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(size))
    header.pop("__metadata__", None)
    return {
        name: (entry["shape"], CODES[entry["dtype"]], Place(file, 8 + size + begin, end - begin))
        for name, entry in header.items()
        for begin, end in [entry["data_offsets"]]
    }


def _read(file: Path, offset: int, target: Tensor) -> None:
    with open_regular(file) as opened:
        opened.seek(offset)
        for piece in target.split(PIECE_BYTES):
            on_host = piece if accelerator.is_host(piece.device) else torch.empty_like(piece, device="cpu")
            if opened.readinto(memoryview(on_host.numpy())) != len(piece):
                raise CheckpointError(f"{file} is shorter than it was a moment ago")
            if on_host is not piece:
                piece.copy_(on_host)


class StateReader:
    """Fills tensors with those of a checkpoint: each rank reads what it needs, or rank 0 reads and sends.

    Args:
        files: None on ranks that only receive.
        collectives: by which rank 0 sends; None: each rank reads.
    """

    def __init__(self, files: TensorFiles | None, collectives: Collectives | None = None) -> None:
        self._files, self._collectives = files, collectives

    def load(self, value: Any) -> Any:
        """Return a nested value with new tensors in host memory. A collective, if rank 0 sends."""
        pairs: list[tuple[AnyTensor, Tensor]] = []
        loaded = tree_map_only(
            (Tensor, StoredTensor), lambda saved: pairs.append((saved, new_like(saved))) or pairs[-1][1], value
        )
        self.fill(pairs)
        return loaded

    def fill(self, pairs: Sequence[tuple[AnyTensor, Tensor]]) -> None:
        """Fill tensors of the same shape each, of a sharded one this rank's rows. A collective, if rank 0 sends.

        Beside them it takes memory for a piece, or for a tensor whose order in memory is another one.
        """
        batch: list[_Landing] = []
        room = PIECE_BYTES
        for saved, target in pairs:
            part, first = local_rows(target.detach())
            if isinstance(saved, Tensor):
                part.copy_(_rows(saved, first, part))
            else:
                batch.append(_Landing(saved, part, first))
                room -= batch[-1].bytes.nbytes
            if room <= 0:
                self._fill(batch)
                batch, room = [], PIECE_BYTES
        self._fill(batch)

    def _fill(self, batch: Sequence[_Landing]) -> None:
        if self._files is not None:
            for landing in batch:
                self._files.read(landing.name, landing.bytes, landing.start)
        if self._collectives is not None:
            self._collectives.broadcast_tensors([landing.bytes for landing in batch])
        for landing in batch:
            landing.finish()


class _Landing:
    """The bytes that a stored tensor is read into: those of its target, or of a copy in the order of the file."""

    def __init__(self, saved: StoredTensor, target: Tensor, first_row: int) -> None:
        self.name, self._target, self._first_row, self._copy = saved.name, target, first_row, None
        like = saved.like
        if like.is_contiguous() and target.is_contiguous() and like.dtype == target.dtype:
            self.bytes = as_bytes(target)
            self.start = first_row * (target.nbytes // max(1, len(target)) if target.dim() else 0)
        else:
            self._copy = new_like(saved)
            self.bytes = torch.empty(0, dtype=torch.uint8).set_(self._copy.untyped_storage())
            self.start = 0

    def finish(self) -> None:
        if self._copy is not None:
            self._target.copy_(_rows(self._copy, self._first_row, self._target))


def new_like(saved: AnyTensor, parameter: Tensor | None = None) -> Tensor:
    """Return a new tensor for a saved one: as a parameter if that has its shape, else in host memory.

    That is sharded as the parameter is, and on its device.
    """
    like = saved if isinstance(saved, Tensor) else saved.like
    if parameter is not None and like.dim() and like.shape == parameter.shape:
        return torch.empty_like(parameter, dtype=like.dtype, requires_grad=False)
    return torch.empty_strided(like.size(), like.stride(), dtype=like.dtype)


def _rows(whole: Tensor, first: int, target: Tensor) -> Tensor:
    return whole[first : first + len(target)] if target.dim() else whole
