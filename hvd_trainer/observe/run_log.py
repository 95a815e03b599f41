"""What a run says and what it leaves behind: lines on the terminal, metrics.jsonl, TensorBoard, config.yaml."""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import logging
import math
import os
import socket
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import yaml

from hvd_trainer.backends import Backend
from hvd_trainer.errors import OptionError
from hvd_trainer.utils.files import atomic_write, find_unsafe_path, open_regular, read_regular

logger = logging.getLogger(__name__)

NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
"""What file systems without locks say, such as Lustre mounted without them."""
HAND_OVER_S, POLL_S = 20.0, 0.1
"""How long a frozen rank 0 may still have the folder: horovodrun sends it SIGTERM, and SIGKILL 5 s later."""
METRICS, FACTS, LOCK, JOB, CONFIG = "metrics.jsonl", "run.json", ".lock", ".job", "config.yaml"
WRITTEN = (METRICS, FACTS, LOCK, JOB, CONFIG, "tokenizer.json", "failures", "profile", "steps", "trace")
"""What a run writes into where it is, and does not put there as a whole."""
MAX_LINE_BYTES, MOST_NAMES_BYTES = 2**20, 2**20
"""Of a line of metrics.jsonl, and of the file with the names of the job."""
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
        # Where ranks come and go, horovodrun ends a frozen rank 0 while the others meet in their next world.
        self._patience_s = HAND_OVER_S if any(peer.past_worlds for peer in backend.session.peers) else 0.0
        self.prints = first and not quiet
        self.place = Path(folder).expanduser() if folder else None
        """Where the folder is, or would be, on this rank's node."""
        self.folder = self.place if first else None
        self._board: Any = None
        self._lines: Any = None
        self._lock: Any = None
        self.ended = False
        """Whether the records have the line of the run's end."""
        trouble = backend.broadcast_object(self._open()) if folder else None
        if trouble is not None:
            raise OptionError(f"--log-dir {folder} cannot be written to: {trouble}")

    def _open(self) -> str | None:
        """Opens metrics.jsonl and TensorBoard's file; returns why it cannot."""
        if self.folder is None:
            return None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            return find_unsafe_path(self.folder, WRITTEN) or self._claim(self.folder / LOCK)
        except OSError as error:
            return str(error)

    def _claim(self, file: Path) -> str | None:
        """Takes the folder for this job until it ends, however it ends; returns why it cannot."""
        self._lock = file.open("a+")
        deadline = time.monotonic() + self._patience_s
        while True:
            try:
                # Of the process, and not of its open file, which the workers of a killed rank hold a while longer.
                fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except (BlockingIOError, PermissionError):
                if time.monotonic() >= deadline:
                    self._lock.seek(0)
                    who = self._lock.read().strip()
                    return f"another job is using it ({who}). Name another folder, or end that job"
                time.sleep(POLL_S)
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
                break
        self._lock.truncate(0)
        self._lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        self._lock.flush()
        return None

    def holds(self, names: Collection[str]) -> bool:
        """Whether the run in the folder, as this node sees it, was begun by the job of one of these names."""
        if self.place is None:
            return False
        try:
            known = read_regular(self.place / JOB, MOST_NAMES_BYTES).decode()
        except (OSError, ValueError):
            return False
        return not set(names).isdisjoint(known.splitlines())

    def begin(
        self, step: int, epoch: int, *, goes_on: bool, finished: bool = False, names: Collection[str] = ()
    ) -> None:
        """Opens the records at a position.

        Args:
            step: steps done.
            epoch: epochs finished.
            goes_on: whether the run in the folder is the one that goes on. Then what its records hold of later
                steps is dropped, since it comes again; else that run is moved into a folder of its own.
            finished: whether nothing is left to train: then the line of its end stays.
            names: of this job, for `holds`.

        Raises:
            OptionError: the records cannot be written to.
        """
        if self.folder is None:
            return
        file = self.folder / METRICS
        try:
            if goes_on:
                self.ended = _drop_later(file, step, epoch, finished)
            elif (aside := _set_aside(self.folder)) is not None:
                self.say(f"log      the run that was in {self.folder} is now in {aside}")
            (self.folder / JOB).write_text("".join(f"{name}\n" for name in names))
            self._lines = file.open("a", buffering=1)
            # Imported now, and not when the first line is due: that is a step, and all ranks would wait for it.
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(self.folder), purge_step=step + 1)
        except OSError as error:
            raise OptionError(f"--log-dir {self.folder} cannot be written to: {error}") from error

    def say(self, text: str) -> None:
        """Prints a line for the person who started the run."""
        if self.prints:
            logger.info(text)

    def write_config(self, options: dict[str, Any]) -> None:
        """Keeps the options as YAML that `--config` reads."""
        if self.folder is not None:
            plain = {name: _plain(value) for name, value in options.items()}
            (self.folder / CONFIG).write_text(yaml.safe_dump(plain, sort_keys=False))

    def write_facts(self, facts: dict[str, Any]) -> None:
        """Keeps what the run found where it runs: data, model, engine, versions."""
        if self.folder is not None:
            (self.folder / FACTS).write_text(json.dumps(facts, indent=1) + "\n")

    def record(self, event: str, values: dict[str, Any]) -> None:
        """Appends one line to metrics.jsonl, and its figures to TensorBoard: `train/loss`, `step/train/loss`."""
        if self._lines is None:
            return
        clean = {key: _finite(value) for key, value in values.items()}
        try:
            self._lines.write(json.dumps({"event": event, **clean}) + "\n")
            self._draw(event, clean)
        except OSError as error:
            raise OptionError(f"--log-dir {self.folder} cannot be written to any more: {error}") from error

    def _draw(self, event: str, clean: dict[str, Any]) -> None:
        if event == "end":
            return
        prefix = "step/" if event == "step" else ""
        for key, value in clean.items():
            if isinstance(value, float) and key.startswith(SHOWN):
                name = key.replace("_", "/", 1) if key.startswith(("train_", "test_")) else key
                self._board.add_scalar(prefix + name, value, clean["step"])

    def close(self) -> None:
        try:
            for record in (self._board, self._lines):
                if record is not None:
                    record.close()
        except OSError as error:
            logger.error("error: the last lines could not be written to %s: %s", self.folder, error)
        if self._lock is not None:
            self._lock.close()


def _set_aside(folder: Path) -> Path | None:
    """Moves an earlier run's files to `earlier-1`, `earlier-2`, ...; None where there is none."""
    names = (METRICS, FACTS, CONFIG, "model.safetensors", "checkpoints", "failures", "steps", "profile")
    found = [folder / name for name in names if (folder / name).exists()]
    found += folder.glob("events.out.tfevents.*")
    if not found:
        return None
    aside = next(place for n in itertools.count(1) if not (place := folder / f"earlier-{n}").exists())
    aside.mkdir()
    for path in found:
        path.rename(aside / path.name)
    return aside


def _drop_later(file: Path, step: int, epoch: int, finished: bool = False) -> bool:
    """Keeps the whole lines of metrics.jsonl up to a position: a killed run wrote on after its last checkpoint.

    Returns whether the line of the end is among them, which stays only if the run is finished.
    """
    if not file.exists():
        return False
    end = None
    with atomic_write(file) as temporary, open_regular(file) as lines, temporary.open("wb") as kept:
        # One that is longer than ours are comes in pieces, so that none fills the memory.
        while line := lines.readline(MAX_LINE_BYTES):
            if _is_before(line, step, epoch):
                kept.write(line.rstrip(b"\n") + b"\n")
            elif finished and _event(line) == "end":
                end = line
        if end is not None:
            kept.write(end.rstrip(b"\n") + b"\n")
    return end is not None


def _event(line: bytes) -> str | None:
    try:
        return str(json.loads(line)["event"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _is_before(line: bytes, step: int, epoch: int) -> bool:
    try:
        record = json.loads(line)
        if record["event"] == "step":
            return int(record["step"]) <= step
        return record["event"] == "epoch" and int(record["epoch"]) <= epoch
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return False  # torn, or not ours


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become text."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _plain(value: Any) -> Any:
    """What YAML can hold: a path or another object of a job's own options becomes text."""
    if isinstance(value, list | tuple | set):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
