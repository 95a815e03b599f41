"""What a run says and what it leaves behind: lines on the terminal, metrics.jsonl, TensorBoard, config.yaml."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import yaml

from hvd_trainer.backends import Backend
from hvd_trainer.errors import OptionError
from hvd_trainer.launch import World

SHOWN = ("train_", "test_", "lr", "samples_per_s")
"""TensorBoard shows what begins so."""


class RunLog:
    """The log of one run. Rank 0 prints and writes; on other ranks every call does nothing.

    Args:
        backend: the engine: all ranks must know if rank 0 cannot write.
        folder: where to write; None: nowhere.
        quiet: print nothing but errors.

    Raises:
        OptionError: the folder cannot be written to; on all ranks.
    """

    def __init__(self, backend: Backend, folder: str | None, *, quiet: bool = False) -> None:
        first = backend.world.is_first
        self.prints = first and not quiet
        self.folder = Path(folder).expanduser() if folder and first else None
        self._board: Any = None
        self._lines: Any = None
        trouble = backend.broadcast_object(self._open()) if folder else None
        if trouble is not None:
            raise OptionError(f"--log-dir {folder} cannot be written to: {trouble}")

    def _open(self) -> str | None:
        """Opens metrics.jsonl and TensorBoard's file; returns why it cannot."""
        if self.folder is None:
            return None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lines = (self.folder / "metrics.jsonl").open("a", buffering=1)
            # Imported now, and not when the first line is due: that is a step, and all ranks would wait for it.
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(self.folder))
        except OSError as error:
            return str(error)
        return None

    def say(self, text: str) -> None:
        """Prints a line for the person who started the run."""
        if self.prints:
            print(text, flush=True)

    def write_config(self, options: dict[str, Any]) -> None:
        """Keeps the options as YAML that `--config` reads."""
        if self.folder is not None:
            plain = {name: _plain(value) for name, value in options.items()}
            (self.folder / "config.yaml").write_text(yaml.safe_dump(plain, sort_keys=False))

    def record(self, event: str, values: dict[str, Any]) -> None:
        """Appends one line to metrics.jsonl, and its figures to TensorBoard: `train/loss`, `step/train/loss`."""
        if self._lines is None:
            return
        clean = {key: _finite(value) for key, value in values.items()}
        self._lines.write(json.dumps({"event": event, **clean}) + "\n")
        if event == "end":
            return
        prefix = "step/" if event == "step" else ""
        for key, value in clean.items():
            if isinstance(value, float) and key.startswith(SHOWN):
                name = key.replace("_", "/", 1) if key.startswith(("train_", "test_")) else key
                self._board.add_scalar(prefix + name, value, clean["step"])

    def close(self) -> None:
        if self._board is not None:
            self._board.close()
        if self._lines is not None:
            self._lines.close()


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become text."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _plain(value: Any) -> Any:
    """What YAML can hold: a path or another object of a job's own options becomes text."""
    if isinstance(value, list | tuple | set):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def say_error(world: World | None, text: str) -> None:
    """Prints an error and the rank that it comes from, in one write, so that ranks do not mix their lines."""
    where = f"[rank {world.rank}] " if world is not None and world.size > 1 else ""
    sys.stderr.write(f"{where}error: {text}\n")
    sys.stderr.flush()
