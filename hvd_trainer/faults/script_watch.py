"""Whether a rank makes progress that does not say so, and its phase by the folder of the code that it runs.

The `Trainer` tells the monitor what it is doing. A script does not, so a thread looks where its main thread is.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from types import FrameType
from typing import Any

from hvd_trainer.faults import exchanges
from hvd_trainer.faults.activity import END, EXCHANGE, Activity
from hvd_trainer.utils.threads import start_thread

LOOK_EVERY_S = 1.0
REPORT_AFTER_S = 600.0
"""How long a rank may make no progress before that is reported, where no time limit ends the job."""

PHASES = {
    "/torch/distributed/": EXCHANGE,
    "/horovod/": EXCHANGE,
    "/hvd_trainer/hvd/": EXCHANGE,
    # DDP waits for the other ranks at the end of backward, in C++.
    "/torch/autograd/": EXCHANGE,
    "/torch/utils/data/": "data",
    "/torch/optim/": "step",
    "/torch/nn/": "forward",
}
"""Elsewhere it runs the user's code."""
USERS_CODE = "callback"


def phase_raised_in(error: BaseException) -> str:
    """Return the phase in which an exception was raised, by its traceback.

    One that was raised in an exchange may be the consequence of another rank's failure.
    """
    return phase_of(frame for frame, _ in traceback.walk_tb(error.__traceback__))


def phase_of(frames: Iterable[FrameType]) -> str:
    """Return the phase by the innermost frame, the last one, whose code's folder tells."""
    phase = USERS_CODE
    for frame in frames:
        file = frame.f_code.co_filename
        phase = next((phase for folder, phase in PHASES.items() if folder in file), phase)
    return phase


class ScriptWatch:
    """Tells the activity of a script's rank of each sign of progress, and of the main thread's phase.

    Args:
        timeout_s: how long a rank may make no progress before the job ends, in seconds: no step, no exchange, no
            output, and always at one place of the script. None: a report is all that follows.
    """

    def __init__(self, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s
        self._activity: Activity | None = None
        self._num_written = 0
        self._is_ending = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, activity: Activity) -> None:
        """Watch for this activity from now on, instead of that of an earlier session."""
        limit_s = self._timeout_s or REPORT_AFTER_S
        activity.long_limit_s = activity.step_limit_s = limit_s
        activity.reports_only = self._timeout_s is None
        self._activity = activity
        if self._thread is None:
            for stream in (sys.stdout, sys.stderr):
                self._count_output(stream)
            self._thread = start_thread(self._run, "watch")

    def end(self) -> None:
        """Watch no more."""
        self._is_ending.set()
        if self._thread is not None:
            self._thread.join(LOOK_EVERY_S)

    def count_step(self) -> None:
        """Count a completed optimizer step."""
        if self._activity is not None:
            self._activity.finish_step(self._activity.step + 1)

    def waiting(self) -> AbstractContextManager[None]:
        """Mark the block as waiting for other ranks."""
        return nullcontext() if self._activity is None else self._activity.waiting()

    def _run(self) -> None:
        main = threading.main_thread().ident or 0
        last: Any = None
        while not self._is_ending.wait(LOOK_EVERY_S):
            frame = sys._current_frames().get(main)
            stack = [frame for frame, _ in traceback.walk_stack(frame)]
            assert self._activity is not None
            place = [(frame.f_code, frame.f_lasti) for frame in stack]
            progress = place, self._activity.step, self._num_written, exchanges.progress()
            if progress != last and self._activity.phase != END:
                last = progress
                self._activity.enter(phase_of(reversed(stack)))
            del frame, stack

    def _count_output(self, stream: Any) -> None:
        """Count what the script writes to a stream."""
        write: Any = getattr(stream, "write", None)

        def write_and_count(text: str) -> int:
            self._num_written += 1
            written: int = write(text)
            return written

        with suppress(AttributeError):  # a stream of the script's own may take none, or there is none
            stream.write = write_and_count
