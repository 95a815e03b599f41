"""Python stacks of this process, and of one that cannot give them: stopped, or where no thread has a turn."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

SIGNAL = signal.SIGUSR2
MAX_EXCHANGES = 4
UNFINISHED = "Exchanges that the GPU has not finished:"
ANSWER_S = 2.0


def own_stacks() -> str:
    """The stacks of all threads but the one that asks, the main one first."""
    frames = sys._current_frames()
    del frames[threading.get_ident()]
    threads = {thread.ident: thread for thread in threading.enumerate()}
    main = threading.main_thread().ident
    parts = []
    for number in sorted(frames, key=lambda number: number != main):
        name = threads[number].name if number in threads else str(number)
        parts.append(f"Thread {name}, most recent call last:\n" + "".join(traceback.format_stack(frames[number])))
    exchanges = _in_time(unfinished_exchanges)
    if exchanges:
        parts.append("\n".join([UNFINISHED, *(f"  {line}" for line in exchanges), ""]))
    return "\n".join(parts)


def _in_time(asked: Callable[[], list[str]]) -> list[str]:
    """Return what a function does, or nothing if it fails or takes long: it may ask the driver, which may hang."""
    answer: list[str] = []

    def ask() -> None:
        with suppress(Exception):
            answer.extend(asked())

    thread = threading.Thread(target=ask, name="flight-recorder", daemon=True)
    thread.start()
    thread.join(ANSWER_S)
    return list(answer)


def unfinished_exchanges() -> list[str]:
    """Return a line for each exchange in the GPU's queue, oldest first, by PyTorch's flight recorder for NCCL."""
    dump = getattr(sys.modules.get("torch._C._distributed_c10d"), "_dump_nccl_trace_json", None)
    if dump is None:
        return []  # a PyTorch without NCCL
    entries = json.loads(dump(includeCollectives=True, onlyActive=True)).get("entries", [])
    return [
        f"{entry['profiling_name']} of {entry['input_sizes']}, number {entry['collective_seq_id']} of group "
        f"{entry['process_group'][0]}, {entry['state']}"
        for entry in entries[:MAX_EXCHANGES]
    ]


def unfinished_section(text: str) -> str:
    """Return the paragraph of `own_stacks` about exchanges; empty if all were finished."""
    _, heading, lines = text.partition(UNFINISHED)
    return heading + lines.rstrip()


def main_thread_section(text: str) -> str:
    """The main thread's part: of `own_stacks` the first, of `ask` the last."""
    return text.strip().split("\n\n")[-1 if "(most recent call first)" in text else 0]


def register_signal() -> int | None:
    """Has this process write its stacks to memory whenever `SIGNAL` comes, without Python's taking part.

    Returns:
        The file descriptor of that memory; None where the signal is used by others, or the system has none.
    """
    if not hasattr(os, "memfd_create") or signal.getsignal(SIGNAL) is not signal.SIG_DFL:
        return None
    memory = os.memfd_create("stacks")
    faulthandler.register(SIGNAL, memory, all_threads=True)
    return memory


def unregister_signal(memory: int | None) -> None:
    """Takes `answer` back."""
    if memory is not None:
        faulthandler.unregister(SIGNAL)
        os.close(memory)


def request_stacks(process: int, memory: int) -> str:
    """The stacks of another process of this machine and user; empty if it does not answer.

    One that is stopped is made to run on for it.
    """
    file = Path(f"/proc/{process}/fd/{memory}")
    text = ""
    with suppress(OSError):
        os.kill(process, SIGNAL)
        os.kill(process, signal.SIGCONT)
        deadline = time.monotonic() + ANSWER_S
        while time.monotonic() < deadline:
            time.sleep(0.1)
            before, text = text, file.read_text(errors="replace")
            if text and text == before:
                break
    return text
