"""Facts about processes of this machine; calls in threads, and environment variables, of this one."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

BROKEN_PIPE = 128 + signal.SIGPIPE
"""Exit code of a program whose output nobody reads any more."""


def start_time(pid: int) -> str:
    """Return when a process was started, in clock ticks since boot; with it, a reused process number is noticed.

    Raises:
        OSError: there is no such process, or it is not visible.
    """
    # The time of day would change with the machine's clock.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def cpu_ids() -> tuple[int, ...]:
    """Return the CPUs that this process may run on: a launcher may have bound it to some."""
    return tuple(sorted(os.sched_getaffinity(0)))


def start_in_thread(call: Callable[[], T], name: str) -> Future[T]:
    """Start a call that may never return in a daemon thread, which does not keep the process from ending."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


@contextmanager
def ending_with_reader() -> Iterator[None]:
    """End without a word if what reads this process's output has ended before the block, as `head` does.

    Raises:
        SystemExit: so it is.
    """
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        unread = [stream for stream in (1, 2) if _is_unread(stream)]
        if not unread:
            raise  # it was another pipe
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in unread:
            os.dup2(nowhere, stream)  # Python flushes once more when it ends
        raise SystemExit(BROKEN_PIPE) from None


def _is_unread(stream: int) -> bool:
    poll = select.poll()
    poll.register(stream, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


@contextmanager
def set_variables(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables inside the block, and restore their earlier values after it.

    Engines read variables only at their start. Left set, they would mislead a later `launch.world.detect`.
    """
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
