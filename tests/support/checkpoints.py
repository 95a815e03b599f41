"""Checkpoints that are written and read as a whole, by nested states."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvd_trainer.checkpoint import storage
from hvd_trainer.checkpoint.storage import OpenCheckpoint
from hvd_trainer.checkpoint.stored import StateReader


def save(folder: Path, state: Mapping[str, Any], *, step: int = 1, epoch: int = 0, **more: Any) -> Path:
    """Write a checkpoint; return its folder."""
    return storage.save(folder, OpenCheckpoint.of_state(state), step=step, epoch=epoch, **more)


def load(path: Path) -> dict[str, Any]:
    """Read a checkpoint; errors as of `open_checkpoint`."""
    state: dict[str, Any] = StateReader().load(storage.open_checkpoint(path).state())
    return state
