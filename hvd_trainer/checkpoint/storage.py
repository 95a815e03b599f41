"""Checkpoints on the disk: whole or not there, whatever stops the process while it writes one.

checkpoints/.step-000000235.4711/   written here, each file synced to the disk
    state.safetensors               the tensors of what to resume from, as far as rank 0 has them
    state-00001.safetensors         those of rank 1, if ranks have shards or stages: see parts.py
    state.json                      all else, and where each tensor belongs in it: see utils/serialization.py
    manifest.json                   last: what this is, and the size and SHA-256 of the others
checkpoints/step-000000235/         renamed to this; no valid manifest, no checkpoint

The marker that is written last is torchsnapshot's protocol. A checkpoint is known by its manifest alone: its
number counts the saves of a run, so that the newest is the one saved last, whatever the folders are called.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import secrets
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO, NamedTuple, Protocol

import msgspec
from msgspec import Meta, Struct
from safetensors import SafetensorError, serialize_file
from torch import Tensor

from hvd_trainer.checkpoint.stored import StateReader, StoredTensor, stored_tensors
from hvd_trainer.config.figures import BestFigure
from hvd_trainer.errors import CheckpointError, first_line
from hvd_trainer.observe.run_folder import EARLIER
from hvd_trainer.utils.files import UNREADABLE, atomic_write, open_regular, read_regular
from hvd_trainer.utils.serialization import describe, empty, flatten, tensor_specs, to_json, unflatten

FORMAT = 3
TENSORS, TREE, MANIFEST = "state.safetensors", "state.json", "manifest.json"
PartName = Annotated[str, Meta(pattern=r"^state-[0-9]{5}\.safetensors$")]
"""The number is that of the rank that wrote it."""
READ_LATER = ("model/", "optimizer/state/")
"""Beginnings of the names of tensors that are read into those of a model or optimizer, and of no others."""
MAX_READ_BYTES = 2**12
"""Up to this size these are read at once, too: one exchange for all is quicker."""
MAX_MANIFEST_BYTES = 1_000_000
Count = Annotated[int, Meta(ge=0, lt=2**53)]
"""Of steps and all else that is counted; JSON's numbers are exact up to there."""


class FileChecksum(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The size and the SHA-256 of a file."""

    bytes: Count
    sha256: str


class Manifest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The description of a checkpoint, which `manifest.json` holds with a checksum of its own."""

    format: int
    number: Count
    """how many were saved before it, in this folder"""
    step: Count
    """optimizer steps so far"""
    epoch: Count
    """epochs finished"""
    figures: dict[str, float]
    """the record of the epoch that had just ended, such as val_loss; empty inside an epoch"""
    tensors: FileChecksum
    """of state.safetensors"""
    tree: FileChecksum
    """of state.json"""
    parts: dict[PartName, FileChecksum] = {}
    """of the other ranks' tensors; empty if rank 0 had all"""

    @property
    def files(self) -> dict[str, FileChecksum]:
        """All files but the manifest, those with tensors in the order of ranks."""
        return {TREE: self.tree, TENSORS: self.tensors, **dict(sorted(self.parts.items()))}


class OtherParts(Protocol):
    """Parts of a checkpoint that other ranks write; see parts.py."""

    def announce(self, folder: Path | None) -> None: ...

    def collect(self, folder: Path, tree: Any) -> tuple[Any, dict[str, FileChecksum]]: ...


def save(
    folder: Path,
    copied: OpenCheckpoint,
    *,
    step: int,
    epoch: int,
    figures: Mapping[str, float] | None = None,
    others: OtherParts | None = None,
) -> Path:
    """Write one checkpoint.

    Args:
        copied: the state, its tensors on the host. They are written from where they are.
        others: the parts that other ranks write; None: there are none.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: the disk is full, the folder cannot be written to, or a part is missing; older ones stay.
    """
    name = f"step-{step:09d}"
    temporary = folder / f".{name}.{os.getpid()}.{secrets.token_hex(4)}"
    number = 0
    try:
        number = 1 + max((manifest.number for manifest, _ in find_checkpoints(folder)[0]), default=-1)
        temporary.mkdir(parents=True)
        if others is not None:
            others.announce(temporary)
        # JSON has no number for NaN and infinities: no checkpoint is the best by them.
        finite = {name: float(value) for name, value in (figures or {}).items() if math.isfinite(value)}
        about = {"number": number, "step": step, "epoch": epoch, "figures": finite}
        _write(temporary, copied, others, **about)
        # A run that was taken back to an earlier step comes by the same step again.
        final = folder / (f"{name}.{number}" if (folder / name).exists() else name)
        temporary.rename(final)
        _sync_folder(folder)
    except (OSError, ValueError, SafetensorError, CheckpointError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if others is not None:
            others.announce(None)
        text = f"No checkpoint could be written to {folder / name}: {first_line(error).removesuffix('.')}."
        raise CheckpointError(f"{text} Older ones are intact." if number else text) from error
    return final


def _write(path: Path, copied: OpenCheckpoint, others: OtherParts | None, **about: Any) -> None:
    """Write the files of a checkpoint into an empty folder, its manifest with all `about` it last."""
    written = write_tensors(path / TENSORS, copied.tensors)
    tree, parts = (copied.tree, {}) if others is None else others.collect(path, copied.tree)
    (path / TREE).write_bytes(to_json(tree))
    manifest = Manifest(format=FORMAT, tensors=written, tree=_sync(path / TREE), parts=parts, **about)
    content = msgspec.to_builtins(manifest)
    (path / MANIFEST).write_bytes(msgspec.json.encode(content | {"self": _digest(content)}))
    _sync(path / MANIFEST)
    _sync_folder(path)


def write_tensors(file: Path, tensors: Mapping[str, Tensor]) -> FileChecksum:
    """Write contiguous tensors in host memory to a file, and that to the disk.

    Raises:
        OSError, SafetensorError: it cannot be written.
    """
    with atomic_write(file) as temporary:
        serialize_file(tensor_specs(tensors), temporary)
    return _sync(file)


def read_manifest(path: Path) -> Manifest:
    """Read the description of a checkpoint, and accept it only if it is whole.

    Raises:
        CheckpointError: there is none, or it is torn, changed or of another format.
    """
    file = path / MANIFEST
    try:
        content = msgspec.json.decode(read_regular(file, MAX_MANIFEST_BYTES))
        if not isinstance(content, dict):
            raise TypeError("it holds no object")
        if content.get("format") != FORMAT:
            raise CheckpointError(f"{path} has format {content.get('format')!r}, but this version reads {FORMAT}.")
        if content.pop("self", None) != _digest(content):
            raise ValueError("it was changed")
        return msgspec.convert(content, Manifest)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is not a whole checkpoint: it has no {MANIFEST}") from error
    except (OSError, ValueError, TypeError, RecursionError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"{path} is not a whole checkpoint: {MANIFEST}: {error}") from error


@dataclass(frozen=True, eq=False)
class OpenCheckpoint:
    """A state as its tree and its tensors, as `utils.serialization.flatten` splits it.

    Of one that is read from files, all is in memory but the large tensors of model and optimizer.
    """

    tree: Any
    tensors: Mapping[str, Any]
    """each a tensor, or a `StoredTensor`"""

    @classmethod
    def of_state(cls, state: Any) -> OpenCheckpoint:
        """Split a state; its tensors are not copied.

        Raises:
            CheckpointError: it holds what a checkpoint cannot; the message names its path and its type.
        """
        try:
            return cls(*flatten(state))
        except TypeError as error:
            raise CheckpointError(
                f"The state of this run cannot be saved: {first_line(error)}. A checkpoint holds numbers, texts, "
                f"tensors, and lists, tuples and dicts of them; let the `state_dict` that this is of return no "
                f"others."
            ) from error

    def state(self) -> dict[str, Any]:
        """Return the state, with a `StoredTensor` for what is not in memory.

        Raises:
            LookupError, TypeError, ValueError, RuntimeError, AttributeError: it is none.
        """
        state = unflatten(self.tree, self.tensors)
        if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
            raise TypeError("it holds no state by names")
        return state

    def describe(self) -> dict[str, Any]:
        """Return what `of_description` makes the same of on another rank, as plain values and small tensors."""
        stored = {name: tensor for name, tensor in self.tensors.items() if isinstance(tensor, StoredTensor)}
        return {
            "tree": to_json(self.tree),
            "tensors": {name: tensor for name, tensor in self.tensors.items() if name not in stored},
            "stored": {name: (describe(tensor.like), tensor.places) for name, tensor in stored.items()},
        }

    @classmethod
    def of_description(cls, described: Mapping[str, Any]) -> OpenCheckpoint:
        """Return an open checkpoint that another rank has described."""
        stored = {
            n: StoredTensor(empty(like, "meta"), places) for n, (like, places) in described["stored"].items()
        }
        return cls(json.loads(described["tree"]), described["tensors"] | stored)

    @property
    def files(self) -> list[str]:
        """The files with the tensors that are not in memory."""
        stored = (tensor for tensor in self.tensors.values() if isinstance(tensor, StoredTensor))
        return sorted({file for tensor in stored for file, _, _ in tensor.places})


def open_checkpoint(path: Path) -> OpenCheckpoint:
    """Open one checkpoint; no content of it can run code, or take more memory than the files have bytes.

    Raises:
        CheckpointError: it is missing, torn, changed, or of another kind.
    """
    manifest = read_manifest(path)
    try:
        for name, expected in manifest.files.items():
            with open_regular(path / name) as file:
                if os.fstat(file.fileno()).st_size != expected.bytes or _checksum(file) != expected:
                    raise CheckpointError(f"{path} is damaged: {name} is not what its manifest says.")
        stored = stored_tensors(path.absolute() / name for name in manifest.files if name != TREE)
        now = {
            name: tensor
            for name, tensor in stored.items()
            if tensor.like.nbytes <= MAX_READ_BYTES or not name.startswith(READ_LATER)
        }
        tree = json.loads(read_regular(path / TREE, manifest.tree.bytes))
        opened = OpenCheckpoint(tree, stored | StateReader().load(now))
        opened.state()
    except (*UNREADABLE, SafetensorError) as error:
        kind = "" if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: "
        raise CheckpointError(f"{path} is not a whole checkpoint: its state: {kind}{first_line(error)}") from error
    return opened


def find_checkpoints(folder: Path) -> tuple[list[tuple[Manifest, Path]], list[CheckpointError]]:
    """Return the checkpoints of a folder with a valid manifest, newest first, and the errors of the others."""
    valid, refused = [], []
    # Not those of earlier runs, where they stay on the disk that the folder is a link to.
    for path in sorted(path for path in folder.glob("[!.]*") if path.is_dir() and not path.match(f"{EARLIER}*")):
        try:
            valid.append((read_manifest(path), path))
        except CheckpointError as error:
            refused.append(error)
    return sorted(valid, key=lambda entry: entry[0].number, reverse=True), refused


def prune(folder: Path, *, keep: int, best: BestFigure | None) -> None:
    """Remove all checkpoints but the newest `keep` and the best.

    Args:
        best: the figure by which the best one stays as well.

    Raises:
        CheckpointError: one cannot be removed.
    """
    checkpoints, _ = find_checkpoints(folder)
    kept = {path for _, path in checkpoints[:keep]}
    if best is not None and (best_path := find_best(checkpoints, best)) is not None:
        kept.add(best_path)
    try:
        for path in [path for _, path in checkpoints if path not in kept]:
            # Hidden first: a removal that is interrupted leaves no half checkpoint behind.
            path.rename(path.with_name(f".{path.name}.old"))
    except OSError as error:
        raise CheckpointError(f"An old checkpoint could not be removed from {folder}: {error}") from error
    remove_leftovers(folder)


def remove_leftovers(folder: Path) -> None:
    """Remove what interrupted saves and removals have left.

    Raises:
        CheckpointError: something cannot be removed.
    """
    try:
        for path in folder.glob(".step-*"):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:  # where a link leads is not ours
                path.unlink()
    except OSError as error:
        raise CheckpointError(f"What is left of a checkpoint could not be removed: {error}") from error


def find_best(checkpoints: list[tuple[Manifest, Path]], best: BestFigure) -> Path | None:
    """Return the checkpoint with the best figure; of equals the earliest."""
    rated = [(best.rate(m.figures), m.number, path) for m, path in checkpoints if best.figure in m.figures]
    return min(rated)[2] if rated else None


class LoadedCheckpoint(NamedTuple):
    """Checkpoint that a run resumes from, and its path."""

    opened: OpenCheckpoint | None = None
    """None: from nothing"""
    continues_run: bool = False
    """whether it is a checkpoint of the run in the log folder itself"""
    notes: Sequence[str] = ()
    """lines for the log: from where it is, and which newer ones were refused"""


def restore(log_folder: Path | None, resume: str) -> LoadedCheckpoint:
    """Open the newest valid checkpoint that `--resume` allows.

    Args:
        resume: none, auto, or the path of a checkpoint, or of a folder with checkpoints.

    Raises:
        CheckpointError: a path was given, or there are checkpoints, and none is valid.
    """
    if resume == "none":
        return LoadedCheckpoint()
    place = (log_folder or Path()) if resume == "auto" else Path(resume).expanduser()
    if resume != "auto" and not place.is_dir():
        raise CheckpointError(
            f"{place} is not a checkpoint: there is no such folder. Name a checkpoint or a log folder"
        )
    if resume != "auto" and ((place / MANIFEST).exists() or (place / TENSORS).exists()):
        return LoadedCheckpoint(open_checkpoint(place), _is_in(place, log_folder), [f"from {place}"])
    folder = place / "checkpoints"
    if resume != "auto" and not folder.is_dir():
        folder = place
    checkpoints, refused = find_checkpoints(folder)
    for _, path in checkpoints:
        try:
            notes = [*(f"not from this one: {error}" for error in refused), f"from {path}"]
            return LoadedCheckpoint(open_checkpoint(path), _is_in(path, log_folder), notes)
        except CheckpointError as error:
            refused.append(error)
    if refused or resume != "auto":
        reasons = [*map(str, refused), f"{folder} has no checkpoint that can be used"]
        remedy = ". To start from the beginning: --resume none" if resume == "auto" else ""
        raise CheckpointError("; ".join(reasons) + remedy)
    return LoadedCheckpoint(notes=[f"nothing to resume from in {folder}: a new start"])


def _is_in(path: Path, log_folder: Path | None) -> bool:
    return log_folder is not None and path.resolve().parent == (log_folder / "checkpoints").resolve()


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _sync(path: Path) -> FileChecksum:
    """Have the system write a file to the disk; return its checksum, as it is read back."""
    with open_regular(path) as file:
        os.fsync(file.fileno())
        return _checksum(file)


def _checksum(file: BinaryIO) -> FileChecksum:
    digest = hashlib.sha256()
    while block := file.read(2**20):
        digest.update(block)
    return FileChecksum(bytes=file.tell(), sha256=digest.hexdigest())


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
