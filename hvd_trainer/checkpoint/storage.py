"""Checkpoints on the disk: whole or not there, whatever stops the process while it writes one.

checkpoints/.step-000000235.4711/   written here, each file synced to the disk
    state.pt                        what to go on from
    manifest.json                   last: what this is, and the size and SHA-256 of state.pt
checkpoints/step-000000235/         renamed to this; no valid manifest, no checkpoint

The marker that is written last is torchsnapshot's protocol. A checkpoint is known by its manifest alone: its
number counts the saves of a run, so that the newest is the one saved last, whatever the folders are called.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import pickle
import secrets
import shutil
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from hvd_trainer.config.stop_condition import is_better_lower
from hvd_trainer.errors import CheckpointError, first_line
from hvd_trainer.utils.files import UNREADABLE, open_regular, read_regular

FORMAT = 2
STATE, MANIFEST = "state.pt", "manifest.json"
MAX_MANIFEST_BYTES = 1_000_000
MAX_COUNT = 2**53
"""Of steps and all else that is counted."""


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself."""

    format: int
    number: int
    """how many were saved before it, in this folder"""
    step: int
    """optimizer steps so far"""
    epoch: int
    """epochs finished"""
    figures: Mapping[str, float]
    """the record of the epoch that had just ended, such as test_loss; empty inside an epoch"""
    bytes: int
    sha256: str
    """of state.pt"""


def save(
    folder: Path, state: Mapping[str, Any], *, step: int, epoch: int, figures: Mapping[str, float] | None = None
) -> Path:
    """Writes one checkpoint.

    Args:
        folder: the run's `checkpoints` folder.
        state: tensors, numbers, strings, lists and dictionaries.
        step, epoch, figures: as in `Manifest`.

    Raises:
        CheckpointError: the disk is full or the folder cannot be written to; older checkpoints stay.
    """
    name = f"step-{step:09d}"
    temporary = folder / f".{name}.{os.getpid()}.{secrets.token_hex(4)}"
    try:
        number = 1 + max((manifest.number for manifest, _ in whole(folder)[0]), default=-1)
        temporary.mkdir(parents=True)
        with (temporary / STATE).open("wb") as file:
            torch.save(dict(state), file)
            _sync(file)
        with open_regular(temporary / STATE) as written:
            known = _fingerprint(written)
        manifest = Manifest(FORMAT, number, step, epoch, _finite(figures or {}), **known)
        with (temporary / MANIFEST).open("w") as text:
            json.dump(asdict(manifest) | {"self": _digest_of(asdict(manifest))}, text)
            _sync(text)
        _sync_folder(temporary)
        # A run that was taken back to an earlier step comes by the same step again.
        final = folder / name
        if final.exists():
            final = folder / f"{name}.{number}"
        temporary.rename(final)
        _sync_folder(folder)
    except (OSError, RuntimeError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        # PyTorch speaks of positions in its file, and the system's reason stands behind that.
        reason = error.__context__ if isinstance(error.__context__, OSError) else error
        raise CheckpointError(
            f"No checkpoint could be written to {folder / name}: {reason}. Older ones are intact."
        ) from error
    return final


def read_manifest(path: Path) -> Manifest:
    """Reads what a checkpoint says of itself, and believes it only if it is whole.

    Raises:
        CheckpointError: there is none, or it is torn, changed or of another format.
    """
    file = path / MANIFEST
    try:
        content = json.loads(read_regular(file, MAX_MANIFEST_BYTES))
        if not isinstance(content, dict):
            raise TypeError("it holds no object")
        if content.get("format") != FORMAT:
            raise CheckpointError(f"{path} has format {content.get('format')!r}, but this version reads {FORMAT}.")
        if content.pop("self", None) != _digest_of(content):
            raise ValueError("it was changed")
        return _checked(content)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is not a whole checkpoint: it has no {MANIFEST}") from error
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a whole checkpoint: {MANIFEST}: {error}") from error


def load(path: Path) -> dict[str, Any]:
    """Reads one checkpoint, without running any code that it may hold, into no more memory than it has bytes.

    Raises:
        CheckpointError: it is missing, torn, changed, or of another kind.
    """
    manifest = read_manifest(path)
    try:
        with open_regular(path / STATE) as file:
            if (
                os.fstat(file.fileno()).st_size != manifest.bytes
                or _fingerprint(file)["sha256"] != manifest.sha256
            ):
                raise CheckpointError(f"{path} is damaged: {STATE} is not what its manifest says.")
            _refuse_bomb(file, manifest.bytes)
            state: Any = torch.load(file, map_location="cpu", weights_only=True)
        if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
            raise TypeError("it holds no state by names")
        _refuse_unfolding(state, manifest.bytes)
    except pickle.UnpicklingError as error:
        # PyTorch's own words advise to load it all the same, with the code that is in it.
        raise CheckpointError(
            f"{path} is not a whole checkpoint: {STATE} holds more than tensors and plain values"
            f"{_kinds_in(path)}. Nothing in it was run; do not load it by other means unless you know who made it"
        ) from error
    except UNREADABLE as error:
        kind = "" if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: "
        raise CheckpointError(f"{path} is not a whole checkpoint: {STATE}: {kind}{first_line(error)}") from error
    return state


def whole(folder: Path) -> tuple[list[tuple[Manifest, Path]], list[CheckpointError]]:
    """The checkpoints of a folder with a valid manifest, newest first; and what is wrong with the others."""
    found, refused = [], []
    for path in _subfolders(folder):
        try:
            found.append((read_manifest(path), path))
        except CheckpointError as error:
            refused.append(error)
    return sorted(found, key=lambda entry: entry[0].number, reverse=True), refused


def prune(folder: Path, *, keep: int, best: str | None) -> None:
    """Removes checkpoints but for the newest `keep` and the best.

    Args:
        folder: the run's `checkpoints` folder; no other process may be writing to it.
        keep: how many of the newest stay.
        best: a figure such as test_loss; the one with the lowest (of a loss), else the highest, stays as well.

    Raises:
        CheckpointError: one cannot be removed.
    """
    found, _ = whole(folder)
    staying = {path for _, path in found[:keep]}
    if best is not None and (champion := best_of(found, best)) is not None:
        staying.add(champion)
    try:
        for path in [path for _, path in found if path not in staying]:
            # Hidden first: a removal that is interrupted leaves no half checkpoint behind.
            path.rename(path.with_name(f".{path.name}.old"))
    except OSError as error:
        raise CheckpointError(f"An old checkpoint could not be removed from {folder}: {error}") from error
    sweep(folder)


def sweep(folder: Path) -> None:
    """Removes what interrupted saves and removals have left.

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


def best_of(found: list[tuple[Manifest, Path]], figure: str) -> Path | None:
    """The checkpoint with the lowest loss, or the highest of another figure; of equals the earliest."""
    sign = 1 if is_better_lower(figure) else -1
    rated = [(sign * m.figures[figure], m.number, path) for m, path in found if figure in m.figures]
    return min(rated)[2] if rated else None


class LoadedCheckpoint(NamedTuple):
    """What a run goes on from."""

    state: dict[str, Any] | None = None
    """None: from nothing"""
    goes_on: bool = False
    """whether it is a checkpoint of the run in the log folder itself"""
    said: Sequence[str] = ()
    """what there is to say about it"""


def restore(log_folder: Path | None, resume: str) -> LoadedCheckpoint:
    """Loads the newest valid checkpoint that `--resume` allows.

    Args:
        log_folder: the run's log folder.
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
    if resume != "auto" and ((place / MANIFEST).exists() or (place / STATE).exists()):
        return LoadedCheckpoint(load(place), _is_in(place, log_folder), [f"from {place}"])
    folder = place / "checkpoints"
    if resume != "auto" and not folder.is_dir():
        folder = place
    found, refused = whole(folder)
    for _, path in found:
        try:
            said = [*(f"not from this one: {error}" for error in refused), f"from {path}"]
            return LoadedCheckpoint(load(path), _is_in(path, log_folder), said)
        except CheckpointError as error:
            refused.append(error)
    if refused or resume != "auto":
        reasons = [*map(str, refused), f"{folder} has no checkpoint that can be used"]
        anew = ". To start anew: --resume none" if resume == "auto" else ""
        raise CheckpointError("; ".join(reasons) + anew)
    return LoadedCheckpoint(said=[f"nothing to go on from in {folder}: a new start"])


def _is_in(path: Path, log_folder: Path | None) -> bool:
    return log_folder is not None and path.resolve().parent == (log_folder / "checkpoints").resolve()


def _subfolders(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def _checked(content: dict[str, Any]) -> Manifest:
    """The manifest, if every entry is there and is what it should be."""
    if set(content) != {entry.name for entry in fields(Manifest)}:
        raise ValueError(f"it has the entries {', '.join(map(str, content))}")
    counts = [content[name] for name in ("format", "number", "step", "epoch", "bytes")]
    figures = content["figures"]
    if not all(type(count) is int and 0 <= count < MAX_COUNT for count in counts):
        raise ValueError("its counts are not all numbers from 0 on")
    if not isinstance(figures, dict) or not all(_is_figure(value) for value in figures.values()):
        raise ValueError("its figures are not all numbers")
    if not isinstance(content["sha256"], str):
        raise ValueError("its checksum is none")
    return Manifest(**content)


def _is_figure(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < math.inf


def _finite(figures: Mapping[str, float]) -> dict[str, float]:
    """Plain JSON has no NaN; a figure that is none cannot be the best anyway."""
    return {name: float(value) for name, value in figures.items() if math.isfinite(value)}


def _digest_of(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _fingerprint(file: BinaryIO) -> dict[str, Any]:
    digest = hashlib.sha256()
    while block := file.read(2**20):
        digest.update(block)
    return {"sha256": digest.hexdigest(), "bytes": file.tell()}


def _refuse_bomb(file: BinaryIO, size: int) -> None:
    """`torch.save` packs nothing: an archive with more in it than its size is not to be unpacked.

    Raises:
        ValueError, zipfile.BadZipFile: it is one, or is none of PyTorch's archives.
    """
    file.seek(0)
    # Of a file that begins otherwise PyTorch believes that it is of an older form, which has other rules.
    if file.read(4) != b"PK\3\4":
        raise ValueError("it is no archive of PyTorch's")
    with zipfile.ZipFile(file) as archive:
        if sum(entry.file_size for entry in archive.infolist()) > size:
            raise ValueError("it unpacks to more than its own size")
    file.seek(0)


def _kinds_in(path: Path) -> str:
    """`: 'my_job.Schedule'`: what else a state holds; nothing where that cannot be told."""
    try:
        with open_regular(path / STATE) as file:
            names = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    except UNREADABLE:
        return ""
    return f": {', '.join(map(ascii, names)):.200}" if names else ""


def _refuse_unfolding(state: Mapping[str, Any], most: int) -> None:
    """Goes through a state as whoever uses it would, and counts its bytes and objects: what is in it twice, twice.

    A few bytes can name one list again and again, or a tensor of a huge shape that has one number.

    Raises:
        RecursionError: it is too deep, or contains itself.
        ValueError: there are more than `most`, or a tensor has no contents.
    """
    left = most

    def visit(value: Any) -> None:
        nonlocal left
        left -= 1
        inside: Iterable[Any] = ()
        if isinstance(value, torch.Tensor):
            if value.is_meta:
                raise ValueError("it has a tensor without contents")
            left -= value.numel() * value.element_size()
        elif isinstance(value, bytes | bytearray):
            left -= len(value)
        elif isinstance(value, Mapping):
            inside = itertools.chain.from_iterable(value.items())
        elif isinstance(value, list | tuple | set):
            inside = value
        if left < 0:
            raise ValueError("it unfolds to more than its own size")
        for item in inside:
            visit(item)

    visit(state)


def _sync(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
