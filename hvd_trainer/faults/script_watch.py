"""Whether a rank makes progress that does not say so, and its phase by the module of the code that it runs.

The `Trainer` tells the monitor what it is doing. A script does not, so a thread looks where its main thread is.
"""

from __future__ import annotations

import itertools
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from types import FrameType
from typing import Any

from hvd_trainer.faults import collectives
from hvd_trainer.faults.activity import BACKWARD, COLLECTIVE, END, Activity
from hvd_trainer.faults.stack_dump import module_of, training_stack, users_part
from hvd_trainer.utils.threads import start_thread

LOOK_EVERY_S = 1.0
REPORT_AFTER_S = 600.0
"""How long a rank may make no progress before that is reported, where no time limit ends the job."""

PHASES = {
    "torch.distributed": COLLECTIVE,
    # It broadcasts buffers, around the forward of the model in it.
    "torch.nn.parallel.distributed": COLLECTIVE,
    "horovod": COLLECTIVE,
    "hvd_trainer.c10d": COLLECTIVE,
    "hvd_trainer.hvd": COLLECTIVE,
    # DDP waits for the other ranks at the end of it, in C++.
    "torch.autograd": BACKWARD,
    "torch.utils.data": "data",
    "torch.optim": "step",
    "torch.nn": "forward",
}
"""By the names under which modules were imported, the more special ones first: a user's folders tell nothing."""
USERS_CODE = "script"
POLLING = ("hvd_trainer.hvd", "hvd_trainer.c10d")
"""Their code changes its place while it waits."""


def phase_raised_in(error: BaseException) -> str:
    """Return the phase in which an exception was raised, by its traceback.

    One that was raised in a collective may be the consequence of another rank's failure.
    """
    return phase_of([frame for frame, _ in traceback.walk_tb(error.__traceback__)])


def phase_of(frames: Sequence[FrameType]) -> str:
    """Return the phase of a stack, the outermost frame first.

    In a collective no code of the user's runs inside of the engine's. Else the innermost frame counts that tells.
    """
    phases = [_told(frame) for frame in frames]
    inside = [phase for phase in phases[len(users_part(frames)) :] if phase]
    if inside and inside[-1] == COLLECTIVE:
        return COLLECTIVE
    return next((phase for phase in reversed(phases) if phase not in (None, COLLECTIVE)), None) or USERS_CODE


def _told(frame: FrameType) -> str | None:
    """Return the phase that a frame's module tells."""
    return next((phase for package, phase in PHASES.items() if _is_in(frame, (package,))), None)


def _is_in(frame: FrameType, packages: Sequence[str]) -> bool:
    return any(f"{module_of(frame)}.".startswith(f"{package}.") for package in packages)


class ScriptWatch:
    """Tells the activity of a script's rank of each sign of progress, and of the main thread's phase.

    Args:
        timeout_s: how long a rank may make no progress before the job ends, in seconds: no step, no collective, no
            output, and always at one place of the script. None: a report is all that follows.
    """

    def __init__(self, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s
        self._activity: Activity | None = None
        self._num_written = 0
        self._is_closing = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, activity: Activity) -> None:
        """Watch for this activity from now on, instead of that of an earlier session."""
        limit_s = self._timeout_s or REPORT_AFTER_S
        activity.long_limit_s = activity.step_limit_s = limit_s
        activity.reports_only = self._timeout_s is None
        activity.is_exchanging = lambda: activity.phase == BACKWARD and bool(collectives.unfinished())
        self._activity = activity
        if self._thread is None:
            for stream in (sys.stdout, sys.stderr):
                self._count_output(stream)
            self._thread = start_thread(self._run, "watch")

    def close(self) -> None:
        """Watch no more."""
        self._is_closing.set()
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
        last: Any = None
        while not self._is_closing.wait(LOOK_EVERY_S):
            stack = training_stack()
            assert self._activity is not None
            phase = phase_of(stack)
            seen = itertools.takewhile(lambda frame: not _is_in(frame, POLLING), stack)
            place = [(frame.f_code, frame.f_lasti) for frame in seen]
            progress = place, self._activity.step, self._num_written, collectives.progress()
            if progress != last and self._activity.phase != END:
                last = progress
                self._activity.enter(phase)
            del stack, seen

    def _count_output(self, stream: Any) -> None:
        """Count what the script writes to a stream."""
        write: Any = getattr(stream, "write", None)

        def write_and_count(text: str) -> int:
            self._num_written += 1
            written: int = write(text)
            return written

        with suppress(AttributeError):  # a stream of the script's own may take none, or there is none
            stream.write = write_and_count
