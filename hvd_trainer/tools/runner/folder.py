"""The folder of a tool, which one command at a time uses.

DIR/runs.jsonl    one line per run that has ended
DIR/running/      what the present run writes: metrics, weights, output; gone after it
DIR/failed/       the output of each run that failed, by its line in runs.jsonl
"""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hvd_trainer.errors import OptionError
from hvd_trainer.tools.runner.processes import end_processes, exit_on_sigterm
from hvd_trainer.utils.files import find_unsafe_path


@contextmanager
def locked_folder(out: Path) -> Iterator[Path]:
    """Lock the folder of --out for this command while the context is open, and yield its absolute path.

    On exit, whatever runs in the folder is ended.

    Raises:
        OptionError: another one is using it, or it cannot be written to.
    """
    folder = out.expanduser().resolve()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Other folders are removed when the next run begins.
        files = [path.name for path in folder.iterdir() if path.is_symlink() or not path.is_dir()]
        if strange := find_unsafe_path(folder, [*files, "failed"]):
            raise OptionError(f"--out {folder} cannot be written to: {strange}")
        lock = (folder / ".lock").open("w")
    except OSError as error:
        raise OptionError(f"--out {folder} cannot be written to: {error}") from error
    with lock:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise OptionError(
                f"--out {folder}: another one is using it. Wait for its end, or name another folder ({error})"
            ) from None
        with exit_on_sigterm():
            try:
                clear(folder)
                yield folder
            finally:
                clear(folder)


def running(folder: Path) -> Path:
    """Return the folder into which the present run writes."""
    return folder / "running"


def log_dir(folder: Path) -> Path:
    """Return the log folder of the present run."""
    return running(folder) / "log"


def clear(folder: Path) -> None:
    """Remove the files and end the processes of a run in this folder, also of one whose command was killed."""
    end_processes(folder)
    shutil.rmtree(running(folder), ignore_errors=True)
