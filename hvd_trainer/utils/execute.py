"""Run a file or a module as `python` would."""

from __future__ import annotations

import atexit
import builtins
import os
import pkgutil
import runpy
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType


def execute(job: Sequence[str]) -> None:
    """Run a file or a module as this process's program; it stays `__main__`.

    Args:
        job: the words behind `python`: a file, or -m and a module, and its arguments.
    """
    sys.modules["__main__"] = main = ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    name, *arguments = job
    if name == "-m":
        sys.argv = ["-m", *arguments[1:]]
        _set_first_folder(os.getcwd())
        runpy._run_module_as_main(arguments[0])  # type: ignore[attr-defined]  # what `python -m` itself calls
    elif pkgutil.get_importer(name) is not None:  # an archive
        sys.argv = list(job)
        _set_first_folder(name)
        runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]  # as above
    else:
        sys.argv = list(job)
        _set_first_folder(str(Path(name).resolve().parent))
        # Absolute: the script may change the folder.
        main.__file__ = path = os.path.abspath(name)
        main.__loader__ = loader = SourceFileLoader("__main__", path)
        main.__dict__["__cached__"] = None
        if sys.version_info < (3, 14):  # from then on a module has them once it is asked for them
            main.__dict__["__annotations__"] = {}
        with open(path, "rb") as file:
            code = pkgutil.read_code(file)
        exec(code or loader.source_to_code(loader.get_data(path), path), main.__dict__)


def finish_threads_and_handlers(between: Callable[[], None] = lambda: None) -> None:
    """Wait for threads and call the exit handlers, as Python does after a program's last line.

    Args:
        between: is called when threads have ended, and handlers may not have closed anything.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # as multiprocessing does at the end of its processes
    between()
    atexit._run_exitfuncs()


def _set_first_folder(folder: str) -> None:
    """Put the program's own folder in the place of that of this package's command."""
    if not getattr(sys.flags, "safe_path", False):  # with python -P neither is there
        sys.path[0] = folder
