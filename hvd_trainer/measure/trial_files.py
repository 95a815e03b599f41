"""Keep a trial of a tool out of its user's files: every Python process of the trial looks before it writes.

The working folder of a trial is made of links to the files of the user's (`own_files.py`), in PLACE:

    PLACE/files/home/me/train.py -> /home/me/train.py

    open("log.csv", "a"), a link           the link becomes a copy first
    open("new.csv", "w")                   the trial's own
    open("/home/me/new.csv", "w")          named in PLACE/outside, of which the tool warns
    open("/home/me/log.csv", "a")          OwnFileError, unless a trial of this command has made the file
    open("own.yaml"), import own           named in PLACE/read: when it changes, the run is stale (`stale.py`)

Python tells of what it opens, renames and removes; what PyTorch and safetensors write in C++ and Rust is told by
`WRITERS`. Programs in other languages are not seen.
"""

from __future__ import annotations

import fcntl
import functools
import json
import os
import re
import shutil
import stat
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.util import source_from_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from hvd_trainer.errors import UserError
from hvd_trainer.measure.save_kill import HITS, SaveKill
from hvd_trainer.utils.import_hooks import ImportHooks, wrap

VARIABLE = "HVD_TRAINER_TRIAL"
"""The environment variable with the arguments of the `FileGuard` of each process of a trial, in JSON."""
FOLDER = "{folder}"
"""Stands among the words of a job for an empty folder that each trial has for itself."""
OUTSIDE, LOADED, READ = "outside", "loaded", "read"
"""Files in the trial's place: the paths outside of it that it writes to, that it loads as checkpoints, and that it
reads, each of these behind the time that the file has then."""
MAX_READ = 500
"""Files that a process notes because it reads them. The first are code and configuration, and not yet data."""
INSTALLED = {"site-packages", "dist-packages"}
"""Folders of installed packages."""
NOT_OWN = tuple(
    os.path.realpath(folder) + os.sep
    for folder in (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), Path(__file__).parents[1])
)
"""Folders whose code is not the job's: Python's, and this package."""
WRITERS = {"torch.serialization": ("save", 1), "safetensors._safetensors_rust": ("serialize_file", 1)}
"""Functions that open the file that is their argument without Python, by their module."""
CACHES = re.compile(r"CACHE|._HOME$")
"""Names of variables that tell programs where to keep files of their own, such as TORCH_HOME."""


class OwnFileError(UserError, PermissionError):
    """A trial was about to change a file that is its user's."""


def guard_files(environ: Mapping[str, str]) -> None:
    """Keep this process out of its user's files from now on, if a tool has started it."""
    if VARIABLE in environ:
        FileGuard(*json.loads(environ[VARIABLE])).install()


class FileGuard:
    """Looks at all that this process is about to write, from `install` on.

    Args:
        place: the folder in which all is the trial's own.
        user: the folder that the tool was started in.
        made: the file that lists what the trials of this command have made outside of their places. All else is
            the user's. Times prove nothing: the clock of a file's disk may be another one than this machine's.
    """

    def __init__(self, place: str, user: str, made: str) -> None:
        self._place, self._user, self._made = place, user, made
        # Before it looks: finding that folder writes to it.
        self._temporary = tempfile.gettempdir()
        self._noted: set[tuple[str, str]] = set()
        self._read: set[str] = set()
        self._below = (user + os.sep, place + os.sep)
        self._detaching = threading.RLock()
        is_killed = os.path.exists(os.path.join(place, HITS))
        self._save_kill = SaveKill(place) if is_killed else None

    def install(self) -> None:
        """Begin to look."""
        changes = ("os.truncate", "os.chmod", "os.chown", "os.utime")
        makes = ("os.mkdir", "os.mkfifo")
        handlers: dict[str, Callable[..., None]] = {
            "open": self._on_open,
            "os.remove": self._on_remove,
            "os.rmdir": self._on_remove,
            "os.rename": self._on_rename,
            **dict.fromkeys(changes, lambda path, *_: self.before_write(path)),
            **dict.fromkeys(makes, lambda path, *_: self._on_make(path)),
            **dict.fromkeys(("os.symlink", "os.link"), lambda _, path, *folders: self._on_make(path)),
            "shutil.rmtree": self._on_remove,
            "sqlite3.connect": lambda path: self.before_write(path, is_sure=False),
        }

        def hook(event: str, args: tuple[Any, ...]) -> None:
            handler = handlers.get(event)
            if handler is not None and isinstance(args[0], str | bytes | os.PathLike):
                handler(*args)

        sys.addaudithook(hook)
        after = {name: functools.partial(self._wrap, *writer) for name, writer in WRITERS.items()}
        ImportHooks(aliases={}, absent={}, after=after, stays=True).install()

    def before_write(self, path: Any, *, keeps: bool = True, is_sure: bool = True) -> None:
        """Make a link of the trial a file of its own, and let other files be as they were.

        Args:
            path: that is about to be opened.
            keeps: whether its content stays, so that a link must become a copy.
            is_sure: whether it will be written to; one that most programs only read is warned of.

        Raises:
            OwnFileError: it is outside of the trial, and not made by a trial of this command.
        """
        name = os.path.abspath(os.fsdecode(path))
        real = os.path.realpath(name)
        if self._is_own(real):
            return
        if os.path.islink(name) and self._is_own(os.path.realpath(os.path.dirname(name))):
            if os.path.isfile(real) or not os.path.exists(real):
                self._detach(name, real if keeps else None)
        else:
            self._leave(real, is_sure=is_sure)

    def _on_open(self, path: Any, mode: str | None, flags: int) -> None:
        access = flags & os.O_ACCMODE
        if access == os.O_RDONLY:
            with suppress(OSError, ValueError):  # the working folder may be gone, or the path be none
                self._note_read(os.fsdecode(path))
        elif not os.path.isdir(path):  # `tempfile` names the folder, and Python tells of the file in it, too
            # Also what is opened to read and write: a mapped file (`np.memmap`) changes without another sign.
            self.before_write(path, keeps=not flags & os.O_TRUNC)
            if not flags & os.O_APPEND:  # what only appends, such as to a log, is no save
                self._before_save(path)

    def _before_save(self, path: Any) -> None:
        if self._save_kill is not None:
            self._save_kill.before_write(os.path.realpath(os.fsdecode(path)))

    def _note_read(self, path: str) -> None:
        """Note a file that is read, if it is code of the job's, or any other file below the user's folder."""
        is_code = path.endswith((".py", ".pyc"))
        name = os.path.abspath(path)
        if name in self._read or len(self._read) == MAX_READ or not (is_code or name.startswith(self._below)):
            return
        if name.endswith(".pyc"):
            with suppress(ValueError):  # it lies beside the source, which counts itself
                name = source_from_cache(name)
        real = os.path.realpath(name)
        is_users = is_code or real.startswith(self._user + os.sep)
        is_installed = not INSTALLED.isdisjoint(real.split(os.sep)) or real.startswith(NOT_OWN)
        if is_users and not (is_installed or self._is_own(real) or self._is_of_a_program(real)):
            self._read.add(name)
            self._note(READ, f"{os.stat(real).st_mtime_ns} {real}")

    def _on_remove(self, path: Any, folder: int | None = None) -> None:
        if folder in (None, -1):  # what rmtree removes by its number was seen as a whole
            name = os.path.abspath(os.fsdecode(path))
            real = os.path.join(os.path.realpath(os.path.dirname(name)), os.path.basename(name))
            if os.path.lexists(real) and not self._is_own(real):
                self._leave(real)

    def _on_rename(self, source: Any, target: Any, *folders: int) -> None:
        for path in (source, target):
            self._on_remove(path, *folders[:1])
        self._on_make(target)
        if self._save_kill is not None:
            self._save_kill.before_rename(os.path.realpath(os.fsdecode(source)))

    def _on_make(self, path: Any) -> None:
        """Take note of what a trial makes outside of its place."""
        name = os.path.abspath(os.fsdecode(path))
        real = os.path.join(os.path.realpath(os.path.dirname(name)), os.path.basename(name))
        if not self._is_own(real) and not os.path.lexists(real):
            self._leave(real)

    def _is_own(self, real: str) -> bool:
        return real.startswith(self._place + os.sep) or real == self._made

    def _detach(self, link: str, content: str | None) -> None:
        """Replace a link by a file, once among threads and processes; `content`: the file to copy, or None."""
        # A process's own threads do not wait for each other at a file's lock.
        with self._detaching, open(os.path.join(self._place, ".lock"), "w") as lock:
            fcntl.lockf(lock, fcntl.LOCK_EX)
            if not os.path.islink(link):
                return
            new = f"{link}.{os.getpid()}"
            with open(new, "wb"):
                pass
            if content is not None and os.path.exists(content):
                shutil.copy2(content, new)
            os.replace(new, link)

    def _leave(self, real: str, *, is_sure: bool = True) -> None:
        """Refuse to change a file of the user's, or take note that one is written outside of the trial."""
        if self._is_of_a_program(real):
            return
        try:
            status = os.lstat(real)
        except FileNotFoundError:
            self._note(self._made, real)  # before it is made, so that another rank knows whose it is
        else:
            # An empty file, such as a lock, has nothing to lose.
            has_content = status.st_size or stat.S_ISDIR(status.st_mode)
            if is_sure and has_content and not self._is_made_by_trials(real):
                raise OwnFileError(
                    f"{real} is a file of yours, and no trial may change it. Write {FOLDER} where the script is "
                    f"told that path: each trial has a folder of its own"
                )
        self._note(OUTSIDE, real)

    def _is_made_by_trials(self, real: str) -> bool:
        """Return whether a trial of this command has made a file or folder, or the folder that it is in."""
        with open(self._made) as lines:
            made = {*lines.read().splitlines()}
        return not made.isdisjoint([real, *map(str, Path(real).parents)])

    def _is_of_a_program(self, real: str) -> bool:
        """Return whether a file is temporary, a device, in a cache, or hidden in the home folder (~/.config).

        Of a folder for such files and the user's, the inner one says so: either may be in the other.
        """
        user = self._user
        caches = [value for name, value in os.environ.items() if CACHES.search(name) and os.path.isabs(value)]
        folders = [*map(os.path.realpath, ("/dev", "/proc", self._temporary, *caches))]
        around = max((f for f in (*folders, user) if real.startswith(f + os.sep)), key=len, default="")
        home = os.path.realpath(os.path.expanduser("~")) + os.sep
        name = real.removeprefix(home).split(os.sep)[0]
        is_hidden = real.startswith(home + ".") and not f"{user}{os.sep}".startswith(f"{home}{name}{os.sep}")
        return around in folders or is_hidden or "__pycache__" in real.split(os.sep)

    def _note(self, file: str, path: str) -> None:
        if (file, path) in self._noted:
            return
        self._noted.add((file, path))
        with open(os.path.join(self._place, file), "a") as lines:
            lines.write(f"{path}\n")

    def _wrap(self, name: str, position: int, module: ModuleType) -> None:
        """Look before a function writes, and take note of what `torch.load` reads of the user's."""

        def look_and_write(write: Any, *args: Any, **kwargs: Any) -> Any:
            path = args[position] if len(args) > position else kwargs.get("f", kwargs.get("filename"))
            if isinstance(path, str | bytes | os.PathLike):
                self.before_write(path, keeps=False)
                self._before_save(path)
            return write(*args, **kwargs)

        wrap(name, look_and_write, module)
        if hasattr(module, "load"):
            wrap("load", self._note_and_load, module)

    def _note_and_load(self, load: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(f, str | os.PathLike) and not self._is_own(real := os.path.realpath(f)):
            self._note(LOADED, real)
        return load(f, *args, **kwargs)
