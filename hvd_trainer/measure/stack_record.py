"""The record of a rank's sampled stacks, LOG_DIR/stacks/rank-0.json, and how their frames are described."""

from __future__ import annotations

import ast
import functools
import linecache
import os
import sys
import sysconfig
from contextlib import suppress
from pathlib import Path
from types import CodeType

from msgspec import Struct, field

FOLDER = "stacks"
MAIN = "main"
"""The name of the main thread."""
AFTER_STEP = "after step"
"""The phase of a script between an optimizer step and the next batch."""
LOADER_START = "loader start"
"""The phase of a rank that waits for the first batch of a loader's processes."""
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
    def location(self) -> tuple[str, int]:
        return self.file, self.line

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
    slow_queued_s: float = 0.0
    """of `slow_s`, ready to run, without a CPU"""
    looks: int = 0
    squares: float = 0.0
    """sum of the squares of its seconds in each step"""


class CallCount(Struct):
    """The calls of a collective from one place of the user's code."""

    function: str
    frame: int = -1
    """number of the record's frame"""
    calls: int = 0
    bytes: int = 0
    first: int = 0
    """the number of the first one, from 0: those of the warm-up do not count"""
    seconds: list[float] = []
    """of the first ones; empty of asynchronous calls"""


class LoaderStarts(Struct):
    """The starts of a loader's processes."""

    times: int = 0
    processes: int = 0
    """of all times"""


class Switches(Struct):
    """Settings of the user that slow every step."""

    anomaly: float = 0.0
    """fraction of the looks at which anomaly detection was on"""
    deterministic: bool = False
    """`torch.use_deterministic_algorithms`"""
    threads: int = 0
    """of this rank's operations on tensors"""
    float64: float = 0.0
    """fraction of the trained parameters' elements that have 64 bits"""
    needless_search: bool = False
    """`find_unused_parameters`, where every parameter is used"""
    variables: dict[str, str] = {}


class Record(Struct, kw_only=True):
    """All stacks of a process since its warm-up."""

    on_trainer: bool = False
    """whether a `Trainer` trains; also where it does not come to its end"""
    uses_gpu: bool
    blocks: int
    """pieces of whole steps, for `squares`"""
    seconds: float
    durations: list[float]
    """of the steps"""
    elements: int
    """of the inputs of all batches"""
    cpu_s: float
    children_s: float = 0.0
    """CPU time of its processes that have ended"""
    machine_s: float = 0.0
    """CPU time of all programs on the cores that this process may use"""
    cores: tuple[int, ...] = ()
    """their numbers"""
    system_s: float
    """of `cpu_s`, in the kernel"""
    major_faults: int
    queued_s: float
    """of all threads but the sampler"""
    frames: list[Frame]
    stacks: list[StackCount]
    calls: list[CallCount] = []
    starts: LoaderStarts = field(default_factory=LoaderStarts)
    switches: Switches = field(default_factory=Switches)


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
    return Frame(file, line, function, called_expression(text), owner_of(file))


def called_expression(text: str) -> str:
    """Return what a call's source calls, such as `time.sleep`; of a loop its head, and empty if it is no call."""
    text = text.strip()
    # Of a loop Python tells all lines, or the first one alone.
    for source in (text, f"{text} pass"):
        with suppress(SyntaxError, ValueError):
            tree = ast.parse(source)
            if tree.body and isinstance(loop := tree.body[0], ast.For):
                return f"for {ast.unparse(loop.target)} in {ast.unparse(loop.iter)}"
            return next((ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)), "")
    return ""


@functools.cache
def owner_of(file: str) -> str:
    """Return whose code a file is: library, hvd_trainer or user."""
    # In a trial of a tool, scripts are found by links to the user's files.
    file = os.path.realpath(file) if os.path.isabs(file) else file
    if any(part in file for part in LIBRARIES) or file.startswith(STANDARD_LIBRARY):
        return "library"
    return "hvd_trainer" if file.startswith(OURS) else "user"
