"""The record of a rank's sampled stacks, LOG_DIR/stacks/rank-0.json, and how their frames are described."""

from __future__ import annotations

import ast
import linecache
import os
import sys
import sysconfig
from contextlib import suppress
from pathlib import Path
from types import CodeType

from msgspec import Struct

FOLDER = "stacks"
MAIN = "main"
"""The name of the main thread."""
WORKER = "worker"
"""The phase of a loader's process."""
LIBRARIES = ("/site-packages/", "/dist-packages/", "<frozen ", "<string>")
STANDARD_LIBRARY = os.path.realpath(sysconfig.get_paths()["stdlib"]) + "/"
OURS = str(Path(__file__).resolve().parents[1]) + "/"

Place = tuple[CodeType, int]
"""A code object, and the offset of the instruction in it."""


class Frame(Struct, frozen=True):
    """A frame of a stack."""

    file: str
    line: int
    function: str
    call: str
    """what the line calls, such as `time.sleep`; empty if it is no call"""
    owner: str
    """library, hvd_trainer or user"""

    @property
    def place(self) -> str:
        return f"{Path(self.file).name}:{self.line}"

    @property
    def name(self) -> str:
        """The function without the functions that it is defined in."""
        return self.function.rpartition("<locals>.")[2]

    def __str__(self) -> str:
        """Return file, line, function, and what is called there."""
        return f"{self.place} {self.name}{f', {self.call}' if self.call else ''}"


class StackCount(Struct):
    """The seconds in which a thread had one stack."""

    thread: str
    phase: str
    frames: list[int] = []
    """numbers of the record's frames, from the outermost on"""
    wall_s: float = 0.0
    cpu_s: float = 0.0
    queued_s: float = 0.0
    """ready to run, without a CPU"""
    gil_s: float = 0.0
    """another thread had the GIL"""
    slow_s: float = 0.0
    """in slow steps"""
    squares: float = 0.0
    """sum of the squares of its seconds in each step"""


class Record(Struct, kw_only=True):
    """All stacks of a process since its warm-up."""

    uses_gpu: bool
    blocks: int
    """pieces of whole steps, for `squares`"""
    seconds: float
    durations: list[float]
    """of the steps"""
    elements: int
    """of the inputs of all batches"""
    cpu_s: float
    system_s: float
    """of `cpu_s`, in the kernel"""
    major_faults: int
    queued_s: float
    """of all threads but the sampler"""
    frames: list[Frame]
    stacks: list[StackCount]


def describe_frame(code: CodeType, instruction: int) -> Frame:
    """Return file, line, function, the called expression (empty if it is no call), and whose code it is."""
    line, text = code.co_firstlineno, ""
    if sys.version_info >= (3, 11):
        start, end, first, last = list(code.co_positions())[instruction // 2]
        if start is not None and end is not None:
            line = start
            lines = [linecache.getline(code.co_filename, number) for number in range(start, end + 1)]
            lines[-1] = lines[-1].encode()[:last].decode(errors="replace")
            lines[0] = lines[0].encode()[first:].decode(errors="replace")
            text = "".join(lines)
    else:
        line = next((n for a, b, n in code.co_lines() if a <= instruction < b and n is not None), line)
        text = linecache.getline(code.co_filename, line)
    function = getattr(code, "co_qualname", code.co_name)
    # In a trial of a tool, scripts are found by links to the user's files.
    file = os.path.realpath(code.co_filename) if os.path.isabs(code.co_filename) else code.co_filename
    return Frame(file, line, function, called_expression(text), _owner(file))


def called_expression(text: str) -> str:
    """Return what a call's source calls, such as `time.sleep`; empty if it is no call."""
    with suppress(SyntaxError, ValueError):
        for node in ast.walk(ast.parse(text.strip())):
            if isinstance(node, ast.Call):
                return ast.unparse(node.func)
    return ""


def _owner(file: str) -> str:
    """Return whose code a file is: library, hvd_trainer or user."""
    if any(part in file for part in LIBRARIES) or file.startswith(STANDARD_LIBRARY):
        return "library"
    return "hvd_trainer" if file.startswith(OURS) else "user"
