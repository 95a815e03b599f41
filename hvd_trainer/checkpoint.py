"""Checkpoints: whole or not there, whatever stops the process while it writes one.

checkpoints/.step-000235.4711/      written here, each file synced to the disk
    state.pt                        what to go on from
    manifest.json                   last: the size and SHA-256 of state.pt
checkpoints/step-000235/            renamed to this; no valid manifest, no checkpoint
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from hvd_trainer.errors import CheckpointError

FORMAT = 1
KEEP = 2
STATE, MANIFEST = "state.pt", "manifest.json"


def save(folder: Path, step: int, state: dict[str, Any]) -> Path:
    """Writes a checkpoint and removes all but the newest `KEEP`.

    Args:
        folder: the run's `checkpoints` folder.
        step: optimizer steps so far; names the checkpoint.
        state: tensors, numbers, strings, lists and dictionaries.

    Raises:
        CheckpointError: the disk is full or the folder cannot be written to; older checkpoints stay.
    """
    final = folder / f"step-{step:09d}"
    temporary = folder / f".{final.name}.{os.getpid()}"
    try:
        temporary.mkdir(parents=True, exist_ok=True)
        with (temporary / STATE).open("wb") as file:
            torch.save(state, file)
            _sync(file)
        manifest = {"format": FORMAT, "step": step, **_fingerprint(temporary / STATE)}
        with (temporary / MANIFEST).open("w") as text:
            json.dump(manifest, text)
            _sync(text)
        if final.exists():
            shutil.rmtree(final)
        temporary.rename(final)
        _sync_folder(folder)
        for old in sorted(folder.glob("step-*"))[:-KEEP]:
            shutil.rmtree(old)
    except (OSError, RuntimeError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(
            f"No checkpoint could be written to {final}: {error}. Older ones are intact."
        ) from error
    return final


def load(path: Path) -> dict[str, Any]:
    """Reads one checkpoint, without running any code that it may hold.

    Raises:
        CheckpointError: it is missing, torn, changed, or of another kind.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        if manifest["format"] != FORMAT:
            raise CheckpointError(f"{path} has format {manifest['format']}, but this version reads {FORMAT}.")
        found = _fingerprint(path / STATE)
        if any(manifest[key] != found[key] for key in found):
            raise CheckpointError(f"{path} is damaged: {STATE} is not what its manifest says.")
        state: dict[str, Any] = torch.load(path / STATE, map_location="cpu", weights_only=True)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{path} is not a whole checkpoint: {error}") from error
    return state


def find(folder: Path, resume: str) -> Iterator[Path]:
    """The checkpoints to try, best first: the given one, or with `auto` the newest in `folder`."""
    if resume == "auto":
        yield from sorted(folder.glob("step-*"), reverse=True)
    else:
        yield Path(resume).expanduser()


def restore(folder: Path | None, resume: str) -> tuple[dict[str, Any] | None, list[str]]:
    """Loads the newest valid checkpoint that `--resume` allows.

    Returns:
        The state, or None to start anew, and what there is to say about it.

    Raises:
        CheckpointError: a path was given and is no valid checkpoint.
    """
    if resume == "none":
        return None, []
    said: list[str] = []
    for path in find(folder or Path(), resume):
        try:
            return load(path), [*said, f"resume   from {path}"]
        except CheckpointError as error:
            if resume != "auto":
                raise
            said.append(f"resume   not from this one: {error}")
    return None, [*said, f"resume   nothing to go on from in {folder}: a new start"]


def _fingerprint(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(2**20):
            digest.update(block)
    return {"sha256": digest.hexdigest(), "bytes": path.stat().st_size}


def _sync(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
