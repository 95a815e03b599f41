"""The log of a run: lines for people, metrics.jsonl, TensorBoard, config.yaml and run.json."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import yaml

from hvd_trainer.backends import Backend
from hvd_trainer.errors import OptionError
from hvd_trainer.observe.run_folder import CONFIG, FACTS, METRICS, RunFolder
from hvd_trainer.utils.files import atomic_write, open_regular, write_atomically
from hvd_trainer.utils.text import install_extra

logger = logging.getLogger(__name__)

LOCK_PATIENCE_S = 20.0
"""How long a frozen rank 0 may still hold the folder: horovodrun sends it SIGTERM, and SIGKILL 5 s later."""
MAX_LINE_BYTES = 2**20
"""Of a line of metrics.jsonl."""
OF_LINE = ("event", "time", "started_at")
"""Keys of a line beside those of its record."""
NON_FINITE = ("nan", "inf", "-inf")
DRAWN = ("train_", "val_", "lr", "samples_per_s")
"""Prefixes of the figures that TensorBoard shows."""


class RunLog:
    """The log of one run. Rank 0 prints and writes; on other ranks every call does nothing.

    Args:
        backend: the engine: all ranks must know if rank 0 cannot write.
        folder: where to write; None: nowhere.
        quiet: print nothing but errors.

    Attributes:
        prints: whether lines are printed on this rank.
        place: the folder as this rank's node sees it, or would see it; None if there is none.
        folder: the same on rank 0, which writes to it; None on the others.
        ended: whether metrics.jsonl has the line of the run's end.
        epochs: on rank 0, what `record` was given for the epochs whose lines metrics.jsonl had at `open_at`.

    Raises:
        OptionError: the folder cannot be written to; on all ranks.
    """

    def __init__(self, backend: Backend, folder: str | None, *, quiet: bool = False) -> None:
        first = backend.world.is_first
        self._run_folder = RunFolder(Path(folder).expanduser()) if folder else None
        self.prints = first and not quiet
        self.place = self._run_folder.path if self._run_folder else None
        self.folder = self.place if first else None
        self._started_at = time.time()
        self._step = 0
        self._board: Any = None
        self._lines: Any = None
        self.ended = False
        self.epochs: list[dict[str, Any]] = []
        if self._run_folder is None:
            return
        # In elastic mode horovodrun ends a frozen rank 0 while the others meet in their next world.
        patience_s = LOCK_PATIENCE_S if any(peer.past_worlds for peer in backend.session.peers) else 0.0
        trouble = backend.collectives.broadcast_object(self._run_folder.lock(patience_s) if first else None)
        if trouble is not None:
            raise OptionError(f"--log-dir {folder} cannot be written to: {trouble}")

    def belongs_to(self, names: Collection[str]) -> bool:
        """Return whether the run in the folder, as this node sees it, was begun by a job of these names."""
        return self._run_folder is not None and self._run_folder.belongs_to(names)

    def open_at(
        self,
        step: int,
        epoch: int,
        evaluated: int = 0,
        *,
        goes_on: bool,
        finished: bool = False,
        names: Collection[str] = (),
    ) -> None:
        """Open the records at a position.

        Args:
            step: steps done.
            epoch: epochs finished.
            evaluated: steps before the newest evaluation inside of an epoch.
            goes_on: whether the run in the folder is resumed. Then records of later steps are dropped, since these
                steps are trained again; else that run is moved into a folder of its own.
            finished: whether nothing is left to train: then the line of its end stays.
            names: of this job, for `belongs_to`.

        Raises:
            OptionError: the records cannot be written to.
        """
        if self._run_folder is None or self.folder is None:
            return
        file = self.folder / METRICS
        try:
            if goes_on:
                self.epochs, self.ended = _drop_later(file, step, epoch, evaluated, finished)
            elif (aside := self._run_folder.set_aside()) is not None:
                self.info(f"log      the run that was in {self.folder} is now in {aside}")
            self._run_folder.write_names(names)
            self._lines = file.open("a", buffering=1)
            self._step = step
        except OSError as error:
            raise OptionError(f"--log-dir {self.folder} cannot be written to: {error}") from error

    def _open_board(self) -> None:
        # Imported now, and not when the first line is due: that is a step, and all ranks would wait for it.
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            self.info(f"log      without TensorBoard's file, which needs: {install_extra('tensorboard')}")
        else:
            self._board = SummaryWriter(str(self.folder), purge_step=self._step + 1)

    def info(self, text: str) -> None:
        """Log a line for the person who started the run, on rank 0 and unless the job is quiet."""
        if self.prints:
            logger.info(text)

    def describe(self, options: dict[str, Any], facts: dict[str, Any]) -> None:
        """Write the options as YAML that `--config` reads, and what the run found; then open TensorBoard's file.

        TensorBoard writes in a thread of its own, whose error on a full disk would be a traceback.

        Raises:
            OptionError: they cannot be written.
        """
        if self.folder is None:
            return
        plain = {name: _plain(value) for name, value in options.items()}
        try:
            write_atomically(self.folder / CONFIG, yaml.safe_dump(plain, sort_keys=False))
            write_atomically(self.folder / FACTS, json.dumps(facts, indent=1) + "\n")
            self._open_board()
        except OSError as error:
            raise OptionError(f"--log-dir {self.folder} cannot be written to: {error}") from error

    def record(self, event: str, values: dict[str, Any]) -> None:
        """Append one line to metrics.jsonl, and its figures to TensorBoard: `train/loss`, `step/train/loss`."""
        if self._lines is None:
            return
        clean = {key: _finite(value) for key, value in values.items()}
        try:
            times = {"time": time.time(), "started_at": self._started_at}
            self._lines.write(json.dumps({"event": event, **clean, **times}) + "\n")
            self._draw(event, clean)
        except OSError as error:
            raise OptionError(f"--log-dir {self.folder} cannot be written to any more: {error}") from error

    def _draw(self, event: str, clean: dict[str, Any]) -> None:
        if event == "end" or self._board is None:
            return
        prefix = "step/" if event == "step" else ""
        for key, value in clean.items():
            if isinstance(value, float) and key.startswith(DRAWN):
                name = key.replace("_", "/", 1) if key.startswith(("train_", "val_")) else key
                self._board.add_scalar(prefix + name, value, clean["step"])

    def close(self) -> None:
        try:
            for record in (self._board, self._lines):
                if record is not None:
                    record.close()
        except OSError as error:
            logger.error("error: the last lines could not be written to %s: %s", self.folder, error)
        if self._run_folder is not None:
            self._run_folder.close()


def _drop_later(
    file: Path, step: int, epoch: int, evaluated: int = 0, finished: bool = False
) -> tuple[list[dict[str, Any]], bool]:
    """Drop the lines of metrics.jsonl behind a position, which a killed run wrote after its last checkpoint.

    Returns:
        The records of the epochs that stay, and whether the line of the end does: only if the run is finished.
    """
    epochs: list[dict[str, Any]] = []
    if not file.exists():
        return epochs, False
    end = None
    with atomic_write(file) as temporary, open_regular(file) as lines, temporary.open("wb") as kept:
        # A line longer than any of ours is read in pieces, so that it cannot fill the memory.
        while line := lines.readline(MAX_LINE_BYTES):
            record = _parse(line)
            if _is_before(record, step, epoch, evaluated, finished):
                kept.write(line.rstrip(b"\n") + b"\n")
                if record["event"] == "epoch":
                    epochs.append({key: _number(value) for key, value in record.items() if key not in OF_LINE})
            elif finished and record.get("event") == "end":
                end = line
        if end is not None:
            kept.write(end.rstrip(b"\n") + b"\n")
    return epochs, end is not None


def _parse(line: bytes) -> dict[str, Any]:
    """Return the record of a line of metrics.jsonl; an empty one if it is torn, or not ours."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def _is_before(record: Mapping[str, Any], step: int, epoch: int, evaluated: int, finished: bool) -> bool:
    """Return whether a run that resumes at a position does not write this record again."""
    try:
        if record["event"] == "epoch" and not finished:
            return int(record["epoch"]) <= epoch
        if record["event"] == "evaluation":
            return int(record["step"]) <= evaluated
        return record["event"] in ("step", "epoch") and int(record["step"]) <= step
    except (ValueError, KeyError, TypeError, OverflowError):
        return False


def _finite(value: Any) -> Any:
    """Return a text for NaN and infinity, which JSON does not have."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _number(value: Any) -> Any:
    """Return what `_finite` was given."""
    return float(value) if isinstance(value, str) and value in NON_FINITE else value


def _plain(value: Any) -> Any:
    """Return what YAML can hold: a path or another object of a job's own options becomes text."""
    if isinstance(value, list | tuple | set):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
