"""Python stacks of this process, and of another one that is suspended or whose threads do not get the GIL."""

from __future__ import annotations

import faulthandler
import itertools
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

SIGNAL = signal.SIGUSR2
ANSWER_TIMEOUT_S = 2.0
FATAL = "Fatal Python error: "
"""How faulthandler's record of a process begins that a signal of its own has ended."""
FATAL_SIGNALS = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
NEUTRAL = {"torch", "horovod", "hvd_trainer", *sys.stdlib_module_names} - {"importlib"}
"""Packages that run and wait on behalf of who calls them, by the names under which modules were imported. An
import is the caller's own work."""


def module_of(frame: FrameType) -> str:
    """Return the name under which a frame's module was imported, or run by -m; `__main__` if it is a file."""
    name, spec = frame.f_globals.get("__name__"), frame.f_globals.get("__spec__")
    return str(spec.name if name == "__main__" and spec is not None else name)


def users_part(frames: Sequence[FrameType]) -> Sequence[FrameType]:
    """Return the frames of a stack, the outermost first, up to the innermost one of the user's own code."""
    inside = itertools.takewhile(lambda frame: module_of(frame).partition(".")[0] in NEUTRAL, reversed(frames))
    return frames[: len(frames) - len([*inside])]


_followed: int | None = None
"""number of the thread that has called `follow_thread` last"""


def follow_thread() -> int:
    """Take the calling thread for the one that trains; return its number.

    It is the main thread under most launchers. Ray Train and notebooks' servers call a function in another one,
    and the main thread's stack says nothing of that.
    """
    global _followed
    _followed = threading.get_ident()
    return _followed


def _training_thread(frames: Mapping[int, FrameType]) -> int:
    """Return the number of the thread that trains; the main thread's if that has ended, or there is none yet."""
    main = threading.main_thread().ident or 0
    return main if _followed is None or _followed not in frames else _followed


def training_stack() -> list[FrameType]:
    """Return the frames of the thread that trains, the outermost first."""
    frames = sys._current_frames()
    frame = frames.get(_training_thread(frames))
    frames.clear()  # they have this function's, too: a cycle, which would keep all, with the script's model
    return [frame for frame, _ in traceback.walk_stack(frame)][::-1]


def users_line(frames: Sequence[FrameType], line: int | None = None) -> str:
    """Return the innermost line of the user's own code in a stack; empty if there is none.

    Args:
        line: its number, if not the one that the frame executes now.
    """
    own = users_part(frames)
    return f"{own[-1].f_code.co_filename}, line {line or own[-1].f_lineno}" if own else ""


def own_stacks() -> str:
    """Return the stacks of all threads but the calling one, that of the thread that trains first."""
    frames = sys._current_frames()
    del frames[threading.get_ident()]
    threads = {thread.ident: thread for thread in threading.enumerate()}
    training = _training_thread(frames)
    parts = []
    for number in sorted(frames, key=lambda number: number != training):
        name = threads[number].name if number in threads else str(number)
        parts.append(f"Thread {name}, most recent call last:\n" + "".join(traceback.format_stack(frames[number])))
    return "\n".join(parts)


def training_section(text: str, thread: int = 0) -> str:
    """Return the stack of the thread that trains: the first paragraph of `own_stacks`, or one of faulthandler's.

    Args:
        thread: its number, by which faulthandler names it; the main thread's stands last there.
    """
    paragraphs = text.strip().split("\n\n")
    by_faulthandler = [part for part in paragraphs if "(most recent call first)" in part]
    named = [part for part in by_faulthandler if f"0x{thread:016x}" in part]
    return (named or by_faulthandler[-1:] or paragraphs)[0]


def fatal_signal(text: str) -> str:
    """Return the name of the signal that has ended a process, from faulthandler's record; empty if none has."""
    _, _, record = text.partition(FATAL)
    words = record.partition("\n")[0]
    names = {signal.strsignal(number): number.name for number in FATAL_SIGNALS}
    return names.get(words, words)


_enabled: set[int] = set()


def register_signal() -> int | None:
    """Make this process write its stacks to shared memory at each `SIGNAL`, without the interpreter's help.

    Also when it is ended by one of `FATAL_SIGNALS`, unless the program has that written elsewhere.

    Returns:
        The file descriptor of the memory; None if the signal has a handler already.
    """
    if signal.getsignal(SIGNAL) is not signal.SIG_DFL:
        return None
    memory = os.memfd_create("stacks")
    faulthandler.register(SIGNAL, memory, all_threads=True)
    if not faulthandler.is_enabled():
        faulthandler.enable(memory)
        _enabled.add(memory)
    return memory


def unregister_signal(memory: int | None) -> None:
    """Undo `register_signal`, given what it returned."""
    if memory is not None:
        faulthandler.unregister(SIGNAL)
        if memory in _enabled:
            _enabled.remove(memory)
            faulthandler.disable()
        os.close(memory)


def request_stacks(pid: int, memory: int, *, resumes: bool = True) -> str:
    """Return the stacks of another process of this machine and user; empty if it does not answer.

    Args:
        memory: what `register_signal` has returned there.
        resumes: make a suspended process run on: it could not answer else.
    """
    text = ""
    # Opened before the signals: a process that runs on may end before it is read, and its memory stays here.
    with suppress(OSError), Path(f"/proc/{pid}/fd/{memory}").open(errors="replace") as stacks:
        os.kill(pid, SIGNAL)
        if resumes:
            os.kill(pid, signal.SIGCONT)
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        while time.monotonic() < deadline:
            time.sleep(0.1)
            stacks.seek(0)
            before, text = text, stacks.read()
            if text and text == before:
                break
    return text
