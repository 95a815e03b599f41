"""Tracebacks that show a user's lines, and not those that pass calls on."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Mapping
from pathlib import Path

SWITCH = "HVD_TRAINER_FRAMES"
PACKAGE = str(Path(__file__).parents[1]) + "/"
CALLERS = "/torch/nn/modules/module.py", "/torch/nn/parallel/distributed.py", contextlib.__file__
"""Files that only call what others have written."""


def format_traceback(error: BaseException, environ: Mapping[str, str]) -> str:
    """Return a traceback without the frames that pass calls on, unless it is one of them that has raised.

    Args:
        environ: with `HVD_TRAINER_FRAMES=all` the traceback is whole.
    """
    whole = traceback.TracebackException.from_exception(error)
    if environ.get(SWITCH) == "all":
        return "".join(whole.format())
    hidden = _hide_frames(whole)
    note = f"({hidden} frames of hvd_trainer and PyTorch are left out. To see them: {SWITCH}=all)\n"
    return "".join(whole.format()) + (note if hidden else "")


def _hide_frames(shown: traceback.TracebackException) -> int:
    """Take the frames that pass calls on out of an exception and its causes; return their number."""
    hidden = 0
    for exception in (shown.__cause__, shown.__context__):
        hidden += 0 if exception is None else _hide_frames(exception)
    stack = shown.stack
    if not stack or _passes_on(stack[-1]):
        return hidden
    others = [frame for frame in stack if not _passes_on(frame)]
    hidden += len(stack) - len(others)
    shown.stack = traceback.StackSummary.from_list(others)
    return hidden


def _passes_on(frame: traceback.FrameSummary) -> bool:
    return frame.filename.startswith(PACKAGE) or frame.filename.endswith(CALLERS)
