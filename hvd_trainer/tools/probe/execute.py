"""Run a file or a module as `python` would."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path


def execute(job: Sequence[str]) -> None:
    """Run a file or a module as this process's program.

    Args:
        job: the words behind `python`: a file, or -m and a module, and its arguments.
    """
    if job[0] == "-m":
        sys.argv = list(job[1:])
        sys.path[0] = os.getcwd()
        runpy.run_module(job[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(job)
        sys.path[0] = str(Path(job[0]).resolve().parent)
        runpy.run_path(job[0], run_name="__main__")
