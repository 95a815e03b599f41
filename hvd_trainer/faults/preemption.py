"""Preemption: SIGTERM or SIGUSR1 on any rank ends the job after the same step on all ranks, with a checkpoint.

Python runs signal handlers in the main thread, between two bytecodes, and that thread may be blocked in a
collective with ranks that are gone. Therefore a thread of its own reads the byte that the interpreter writes at
each signal (`signal.set_wakeup_fd`), and ends a process that makes no progress any more.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import resource_tracker
from types import FrameType

from hvd_trainer.faults.activity import Activity

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
MAX_STALL_S = 20.0
"""How long a process may go without progress after SIGTERM: torchrun and horovodrun kill it 30 s after."""
END = 0
"""Byte that ends the listener; no signal has this number."""
_listening: list[StopRequest] = []


class StopRequest:
    """The first signal that asked this process to stop, and what became of it.

    Attributes:
        number: of the signal; None before there is one.
        granted: whether all ranks are about to stop.
    """

    def __init__(self, stop: Callable[[int], None], activity: Activity) -> None:
        self._stop, self._activity = stop, activity
        self.number: int | None = None
        self.granted = False

    def listen(self, wakeup: socket.socket) -> None:
        """Handle signals, whose numbers arrive as bytes, until `END` does.

        One request often comes as several signals: a scheduler signals all processes, and a launcher its ranks
        again.
        """
        while (number := wakeup.recv(1)[0]) != END:
            if signal.getsignal(number) is not _ignore:
                continue  # SIGINT, which raises KeyboardInterrupt, or a signal that got another handler since
            if self.number is None:
                self.number = number
                self._stop(number)
            if number == signal.SIGTERM:
                threading.Thread(target=self._exit_if_stuck, daemon=True).start()

    def _exit_if_stuck(self) -> None:
        asked = time.monotonic()
        while not self.granted and self in _listening:
            if time.monotonic() - max(asked, self._activity.since) > MAX_STALL_S:
                os._exit(128 + signal.SIGTERM)
            time.sleep(0.2)


def requeue(job_id: str | None, what: str) -> str:
    """Put a Slurm job that was stopped and has saved back into its queue; return what is left to print.

    The message that it resumes by itself is logged before: Slurm ends this process when it requeues the job.

    Args:
        job_id: None: leave it to the user.
        what: what has happened.
    """
    by_hand = "To resume, type the same command with --resume auto"
    if job_id is None:
        return f"{what}. {by_hand}"
    logger.warning("%s. It goes back into Slurm's queue, and then on by itself", what)
    try:
        command = ["scontrol", "requeue", job_id]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=MAX_STALL_S)
    except (OSError, subprocess.SubprocessError) as error:
        text = str(getattr(error, "stderr", None) or error).strip()
        return f"Slurm did not take it back: {text}. {by_hand}"
    return ""


@contextmanager
def listen_for_signals(
    stop: Callable[[int], None], activity: Activity, signals: Sequence[signal.Signals] = SIGNALS
) -> Iterator[StopRequest]:
    """Call a function with the first of some signals, in another thread, inside the context.

    A signal that was not granted is sent again at the end of the context, and has its usual effect then. Does
    nothing in threads other than the main one, where Python allows no handlers.

    Args:
        activity: by its clock, a process that makes no progress after SIGTERM is ended.
    """
    request = StopRequest(stop, activity)
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    _listening.append(request)
    previous = {number: signal.signal(number, _ignore) for number in signals}
    previous_fd = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    listener = threading.Thread(target=request.listen, args=(receiver,), name="signals", daemon=True)
    listener.start()
    try:
        yield request
    finally:
        _listening.remove(request)
        signal.set_wakeup_fd(previous_fd)
        for number, handler in previous.items():
            signal.signal(number, handler)
        # Closing the socket would not end the listener: forked processes have it open, too.
        sender.send(bytes([END]))
        listener.join()
        receiver.close()
        sender.close()
        if request.number is not None and not request.granted:
            os.kill(os.getpid(), request.number)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Do nothing: the listener's thread acts. With no handler, the signal would end the process."""


def _reset_in_child() -> None:
    """Stop listening in a forked process: signals that end it would be written to its parent's socket.

    Garbage of the parent is frozen, not collected: the threads of an engine that has ended, say, do not exist in
    the child, and its destructor crashed loader processes.
    """
    gc.freeze()
    if _listening:
        _listening.clear()
        signal.set_wakeup_fd(-1)
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)


os.register_at_fork(after_in_child=_reset_in_child)


@contextmanager
def block_signals() -> Iterator[None]:
    """Block these signals in what is started inside the context.

    Python's fork server, which starts its processes from 3.14 on, would end by them, and these with it.
    """
    if multiprocessing.get_start_method() != "fork":
        # The server's first step; in older Pythons it ends with SIGTERM unblocked.
        resource_tracker.ensure_running()
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def init_loader_worker(worker: int) -> None:
    """Make a loader process end with its rank, and not by other signals; for `DataLoader(worker_init_fn=)`.

    Signals are sent to whole process groups, and a rank whose loader dies crashes before it has saved.
    """
    # Blocked, so that they stay pending for the thread, which sees who sent them.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    threading.Thread(target=_exit_with_rank, name="signals", daemon=True).start()


def _exit_with_rank() -> None:
    # The rank is the parent, or the parent is Python's fork server, which outlives it.
    rank, parent = multiprocessing.parent_process(), os.getppid()
    assert rank is not None, "for loader processes only"
    while True:
        received = signal.sigtimedwait(SIGNALS, 1.0)
        if received is None:
            # A rank that was killed sends no signal.
            if os.getppid() != parent or not rank.is_alive():
                os._exit(1)
        elif received.si_signo == signal.SIGTERM and received.si_pid == rank.pid:
            os._exit(0)
