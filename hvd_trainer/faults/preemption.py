"""A request to stop: SIGTERM or SIGUSR1 on any rank ends the job after the same step on all, and saved.

Python runs a signal handler in the main thread, between two of its own steps, and that thread may be inside an
exchange with ranks that are gone. So a thread of its own hears the signal, by the byte that the interpreter writes
at once, and ends a process that does not get on any more.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from hvd_trainer.errors import OptionError

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
PATIENCE_S = 20.0
"""How long after SIGTERM a process may be without progress: torchrun and horovodrun kill 30 s after it."""
END = 0
"""Tells the listener to end; no signal has this number."""
_listening: list[StopRequest] = []
_inherited: list[int] = []
"""The process that this one was forked from, if signals were heard there."""


class StopRequest:
    """What was asked of this process by a signal, and what has become of it."""

    def __init__(self, stop: Callable[[int], None]) -> None:
        self._stop = stop
        self._progress = time.monotonic()
        self.number: int | None = None
        """The first signal that came."""
        self.granted = False
        """Whether all ranks are about to stop."""

    def mark_progress(self) -> None:
        """To be called after each step and each batch of evaluation: this process is not stuck."""
        self._progress = time.monotonic()

    def listen(self, ours: socket.socket) -> None:
        """Waits for signals. One is often sent twice, by a scheduler to all processes and by a launcher again."""
        while (number := ours.recv(1)[0]) != END:
            if signal.getsignal(number) is not _let_pass:
                continue  # Ctrl-C, which has its own way, and what others have taken over since
            if self.number is None:
                self.number = number
                self._stop(number)
            if number == signal.SIGTERM:
                self.mark_progress()
                threading.Thread(target=self._end_when_stuck, daemon=True).start()

    def _end_when_stuck(self) -> None:
        while not self.granted and self in _listening:
            if time.monotonic() - self._progress > PATIENCE_S:
                os._exit(128 + signal.SIGTERM)
            time.sleep(0.2)


class Requeue:
    """Puts the Slurm job back into its queue, when it has been stopped and has saved.

    Args:
        wanted: whether to.
        job: the number of the Slurm job; None outside of one.

    Raises:
        OptionError: it is wanted, and this is no Slurm job.
    """

    def __init__(self, wanted: bool, job: str | None) -> None:
        if wanted and job is None:
            raise OptionError(
                "--requeue is for jobs in a Slurm queue, and SLURM_JOB_ID is not set: leave it out, or submit the "
                "job by sbatch"
            )
        self._job = job if wanted else None

    def __call__(self, what: str, *, acts: bool) -> str:
        """Says what has happened, before Slurm ends all that could; returns what is left to say.

        Args:
            what: has happened.
            acts: whether this rank is the one to do it.
        """
        by_hand = "To go on, type the same command with --resume auto"
        if self._job is None or not acts:
            return f"{what}. {by_hand}"
        logger.warning("%s. It goes back into Slurm's queue, and then on by itself", what)
        command = ["scontrol", "requeue", self._job]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=PATIENCE_S)
        except (OSError, subprocess.SubprocessError) as error:
            said = str(getattr(error, "stderr", None) or error).strip()
            return f"Slurm did not take it back: {said}. {by_hand}"
        return ""


@contextmanager
def listen_for_signals(
    stop: Callable[[int], None], signals: Sequence[signal.Signals] = SIGNALS
) -> Iterator[StopRequest]:
    """Inside, the first of the signals calls `stop` with its number, in another thread.

    A signal that was not granted before the end is sent again then, and has its usual effect. Does nothing outside
    the main thread, where Python allows no handlers.
    """
    request = StopRequest(stop)
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    _listening.append(request)
    before = {number: signal.signal(number, _let_pass) for number in signals}
    woken = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    listener = threading.Thread(target=request.listen, args=(ours,), name="signals", daemon=True)
    listener.start()
    try:
        yield request
    finally:
        _listening.remove(request)
        signal.set_wakeup_fd(woken)
        for number, handler in before.items():
            signal.signal(number, handler)
        # Closing would not do: forked processes have the socket too.
        theirs.send(bytes([END]))
        listener.join()
        ours.close()
        theirs.close()
        if request.number is not None and not request.granted:
            os.kill(os.getpid(), request.number)


def _let_pass(number: int, frame: FrameType | None) -> None:
    """The listener acts; a handler must be there, or the system would end the process."""


def _in_a_fork() -> None:
    """A forked process shares the socket, and what ends it must not stop its parent's training.

    Nor may it collect its parent's garbage: an engine that has ended, say, whose threads it does not have. Loader
    processes crashed by that.
    """
    gc.freeze()
    _inherited.clear()
    if _listening:
        _listening.clear()
        _inherited.append(os.getppid())
        signal.set_wakeup_fd(-1)
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)


os.register_at_fork(after_in_child=_in_a_fork)


def init_loader_worker(number: int) -> None:
    """For `DataLoader(worker_init_fn=)`: a loader process ends when its rank says so, and not by others' signals.

    They go to whole process groups, and a rank whose loader dies crashes before it has saved.
    """
    if _inherited:
        # Blocked, so that they wait for the thread, which sees who sent them.
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        threading.Thread(target=_obey, args=(_inherited[0],), name="signals", daemon=True).start()


def _obey(parent: int) -> None:
    while True:
        received = signal.sigtimedwait(SIGNALS, 1.0)
        if received is None:
            # A rank that was killed, or has ended at once after a failure, cannot say so.
            if os.getppid() != parent:
                os._exit(1)
        elif received.si_signo == signal.SIGTERM and received.si_pid == parent:
            os._exit(0)
