"""The session of a script that knows nothing of it: from the first start of an engine to the script's end.

The `Trainer` tells the monitor what it is doing. A script does not, so a thread looks where its main thread is.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import torch.distributed as dist

from hvd_trainer.backends.session import Session
from hvd_trainer.config.options import EngineOptions
from hvd_trainer.errors import LaunchError
from hvd_trainer.faults import exchanges
from hvd_trainer.faults.activity import END, EXCHANGE
from hvd_trainer.faults.script_phase import phase_of, raised_in_exchange
from hvd_trainer.utils import accelerator
from hvd_trainer.utils.threads import start_thread

LOOK_EVERY_S = 1.0
REPORT_AFTER_S = 600.0
"""How long a rank may make no progress before that is reported, where no time limit ends the job."""


class ScriptSession:
    """Starts a session when the script starts its engine, and ends it with the script.

    Args:
        options: of the engine; devices and threads are left to the script, where it chooses them.
        timeout_s: how long a rank may make no progress before the job ends, in seconds: no step, no exchange, no
            output, and always at one place of the script. None: a report is all that follows.
    """

    def __init__(self, options: EngineOptions, *, timeout_s: float | None) -> None:
        self._options, self._timeout_s = options, timeout_s
        self._session: Session | None = None
        self._engine: ModuleType | None = None
        self._shut_down: Callable[[], None] = lambda: None
        self._close_groups: Callable[[], None] = lambda: None
        self._watched: Session | None = None
        """the session that the script has begun last"""
        self._num_written = 0
        self._pid = os.getpid()
        self._has_trainer = False
        self._is_ending = threading.Event()
        self._watcher: threading.Thread | None = None

    @property
    def has_trainer(self) -> bool:
        """Whether the script trains by a `Trainer`, which has a session of its own."""
        return self._has_trainer

    @property
    def is_in_charge(self) -> bool:
        """Whether this process is the rank itself, not a fork of it, and trains without a `Trainer`."""
        return os.getpid() == self._pid and not self._has_trainer

    @property
    def has_started(self) -> bool:
        """Whether the script has started an engine."""
        return self._session is not None or self._engine is not None or self._has_trainer

    def hand_over(self) -> None:
        """Leave engine, monitoring and end to the `Trainer` that the script is about to make.

        Raises:
            LaunchError: the script has started an engine itself.
        """
        if self.is_in_charge and self.has_started:
            raise LaunchError(
                "The script has started an engine before it makes a Trainer, which starts its own: leave "
                "hvd.init() or init_process_group() out, or run the two parts as jobs of their own"
            )
        self._has_trainer = True

    def attach(self, engine: ModuleType) -> None:
        """Watch the sessions that an engine starts by itself, and end it with the script.

        Args:
            engine: has `call_at_start`, `shutdown` and `fail` as `hvd.common.basics` has.
        """
        self._engine = engine
        engine.call_at_start(self._watch)

    def attach_horovod(self, shut_down: Callable[[], None]) -> None:
        """End Horovod, which the script has started, with the script: the others must not wait for this rank."""
        atexit.unregister(shut_down)  # handlers of the script's may take their time, and exchange, after it
        self._shut_down = shut_down

    def attach_groups(self, close: Callable[[], None]) -> None:
        """End Horovod below torch.distributed once all ranks have come to their end: others may still exchange."""
        atexit.unregister(close)
        self._close_groups = close

    def start(self, *, uses_nccl: bool = False) -> Session:
        """Return the session; meet the other ranks if this is the first call. A collective then.

        Raises:
            LaunchError: the ranks could not meet, or share a GPU that NCCL gives to one only.
        """
        if self._session is None:
            self._session = session = Session(self._options)
            session.connect()
            accelerator.set_current(session.device)
            if uses_nccl:
                session.prepare_nccl(keeps_timeouts=self._timeout_s is None)
            session.begin_monitoring()
            self._watch(session)
        return self._session

    def _watch(self, session: Session) -> None:
        """Limit how long the rank may make no progress from now on."""
        is_first, self._watched = self._watched is None, session
        limit_s = self._timeout_s or REPORT_AFTER_S
        session.activity.limits, session.activity.reports_only = (limit_s, limit_s), self._timeout_s is None
        if is_first:
            for stream in (sys.stdout, sys.stderr):
                self._count_output(stream)
            self._watcher = start_thread(self._watch_main_thread, "watch")
        if self._engine is not None:
            atexit.unregister(self._engine.shutdown)

    def _watch_main_thread(self) -> None:
        """Tell the activity of each sign of progress, and of the main thread's phase."""
        main = threading.main_thread().ident or 0
        last: Any = None
        while not self._is_ending.wait(LOOK_EVERY_S):
            frame = sys._current_frames().get(main)
            stack = [frame for frame, _ in traceback.walk_stack(frame)]
            assert self._watched is not None
            activity = self._watched.activity
            place = [(frame.f_code, frame.f_lasti) for frame in stack]
            progress = place, activity.step, self._num_written, exchanges.progress()
            if progress != last and activity.phase != END:
                last = progress
                activity.enter(phase_of(reversed(stack)))
            del frame, stack

    def count_step(self) -> None:
        """Count a completed optimizer step."""
        if self._watched is not None:
            self._watched.activity.step += 1

    def waiting(self) -> AbstractContextManager[None]:
        """Mark the block as waiting for other ranks."""
        return nullcontext() if self._watched is None else self._watched.activity.waiting()

    def _count_output(self, stream: Any) -> None:
        """Count what the script writes to a stream."""
        write = stream.write

        def write_and_count(text: str) -> int:
            self._num_written += 1
            written: int = write(text)
            return written

        stream.write = write_and_count

    def finish(self, leaving: SystemExit | None = None) -> None:
        """End as all ranks do, and wait until all have come to their end.

        Args:
            leaving: by which the script has ended, if that was not after its last line.
        """
        if not self.is_in_charge:
            return  # a fork of it, which has the session's memory and connections
        self._is_ending.set()
        if self._watcher is not None:
            self._watcher.join(LOOK_EVERY_S)
        if self._watched is not None:
            self._watched.ending = _describe(leaving)
        if self._engine is not None:
            self._engine.shutdown()
        session, self._session = self._session, None
        if session is None:
            return
        session.finish()
        self._shut_down()
        session.wait_for_others()
        self._close_groups()
        session.close()

    def fail(self, error: BaseException) -> None:
        """End after an error; raise another one in its place if it only follows from another rank's.

        Raises:
            PeerError: another rank is to blame.
            SystemExit: this rank has left by it, and the monitor has reported that.
        """
        if not self.is_in_charge:
            return
        if self._watched is not None and raised_in_exchange(error):
            self._watched.activity.phase = EXCHANGE
        if self._engine is not None:
            self._engine.fail(error)
        session, self._session = self._session, None
        if session is None:
            return
        session.fail(error)
        session.close()
        session.raise_root_cause(error)

    def check(self, rank: int, size: int) -> None:
        """Check what the script itself says of this rank.

        Raises:
            LaunchError: it contradicts the launcher.
        """
        world = self.start().world
        if (rank, size) not in ((-1, -1), (world.rank, world.size), (-1, world.size), (world.rank, -1)):
            raise LaunchError(
                f"The script starts torch.distributed as rank {rank} of {size}, but {world.launcher} has started "
                f"{world}. Leave rank and world_size out of init_process_group, or start as many ranks as it wants"
            )

    def prefix_store(self, name: str) -> dist.Store:
        """Return the ranks' store under a prefix."""
        return dist.PrefixStore(name, self.start().store)


def _describe(leaving: SystemExit | None) -> str:
    """Return how and where a script has left by `exit`; empty if it has not."""
    frames = traceback.extract_tb(None if leaving is None else leaving.__traceback__)
    places = [frame for frame in frames if "_sitebuiltins" not in frame.filename]  # which has `exit`
    return f" in {places[-1].filename}, line {places[-1].lineno} ({places[-1].line})" if places else ""
