"""Python stacks of this process, and of another one that is suspended or whose threads do not get the GIL."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path

from hvd_trainer.faults import exchanges

SIGNAL = signal.SIGUSR2
MAX_EXCHANGES = 4
UNFINISHED = "Exchanges that are not finished:"
ANSWER_TIMEOUT_S = 2.0


def own_stacks() -> str:
    """Return the stacks of all threads but the calling one, the main thread's first."""
    frames = sys._current_frames()
    del frames[threading.get_ident()]
    threads = {thread.ident: thread for thread in threading.enumerate()}
    main = threading.main_thread().ident
    parts = []
    for number in sorted(frames, key=lambda number: number != main):
        name = threads[number].name if number in threads else str(number)
        parts.append(f"Thread {name}, most recent call last:\n" + "".join(traceback.format_stack(frames[number])))
    unfinished = exchanges.unfinished()[:MAX_EXCHANGES]
    if unfinished:
        parts.append("\n".join([UNFINISHED, *(f"  {exchange.text}" for exchange in unfinished), ""]))
    return "\n".join(parts)


def unfinished_section(text: str) -> str:
    """Return the paragraph about exchanges from the text of `own_stacks`; empty if all were finished."""
    _, heading, lines = text.partition(UNFINISHED)
    return heading + lines.rstrip()


def main_thread_section(text: str) -> str:
    """Return the main thread's stack: the first paragraph of `own_stacks`, the last one of `request_stacks`."""
    return text.strip().split("\n\n")[-1 if "(most recent call first)" in text else 0]


def register_signal() -> int | None:
    """Make this process write its stacks to shared memory at each `SIGNAL`, without the interpreter's help.

    Returns:
        The file descriptor of the memory; None if the signal has a handler already.
    """
    if signal.getsignal(SIGNAL) is not signal.SIG_DFL:
        return None
    memory = os.memfd_create("stacks")
    faulthandler.register(SIGNAL, memory, all_threads=True)
    return memory


def unregister_signal(memory: int | None) -> None:
    """Undo `register_signal`, given what it returned."""
    if memory is not None:
        faulthandler.unregister(SIGNAL)
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
