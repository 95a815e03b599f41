"""The engines that a script starts by itself, for their session: from the first start to the script's end."""

from __future__ import annotations

import atexit
import os
import traceback
from collections.abc import Callable

from hvd_trainer.backends.engine import Engine
from hvd_trainer.backends.session import Session
from hvd_trainer.config.options import EngineOptions
from hvd_trainer.faults.activity import COLLECTIVE
from hvd_trainer.faults.script_watch import ScriptWatch, phase_raised_in


class ScriptEngine(Engine):
    """Has the ranks meet when the script starts an engine, and ends what it has started with the script.

    Args:
        options: of the engine; devices and threads are left to the script, where it chooses them.
        timeout_s: as in `ScriptWatch`.

    Attributes:
        watch: sees whether the script makes progress.
        has_trainer: whether the script trains by a `Trainer`, which has a session of its own.
        pins_device: as in `Engine`; only for groups of NCCL of a script that has chosen no device.
    """

    pins_device = False

    def __init__(self, options: EngineOptions, *, timeout_s: float | None) -> None:
        self.keeps_timeouts = timeout_s is None
        self.watch = ScriptWatch(timeout_s)
        self.has_trainer = False
        self._options = options
        self._uses_nccl = False
        self._session: Session | None = None
        self._begun: list[Session] = []
        """the script's sessions: that of its own engines, and those of `hvd.init`"""
        self._shut_down: Callable[[], None] = lambda: None
        self._close_groups: Callable[[], None] = lambda: None
        self._pid = os.getpid()

    @property
    def uses_nccl(self) -> bool:
        return self._uses_nccl

    @property
    def is_in_charge(self) -> bool:
        """Whether this process is the rank itself, not a fork of it, and trains without a `Trainer`."""
        return os.getpid() == self._pid and not self.has_trainer

    @property
    def has_started(self) -> bool:
        """Whether the script has started an engine."""
        return bool(self._begun) or self.has_trainer

    @property
    def session(self) -> Session | None:
        """The first session that the script has begun; None before."""
        return self._begun[0] if self._begun else None

    def hand_over(self) -> None:
        """Leave engine, monitoring and end to the `Trainer` that the script is about to make.

        One that joins the groups that the script has started itself has a session beside the script's.
        """
        self.has_trainer = not self._begun

    def attach_horovod(self, shut_down: Callable[[], None]) -> None:
        """End Horovod, which the script has started, with the script: the others must not wait for this rank."""
        self._shut_down = shut_down

    def attach_groups(self, close: Callable[[], None]) -> None:
        """End Horovod below torch.distributed once all ranks have come to their end: others may still exchange."""
        atexit.unregister(close)
        self._close_groups = close

    def meet(self, *, uses_nccl: bool = False, has_device: bool = True) -> Session:
        """Return the session of the script's own engines; meet the other ranks if it is new. A collective then.

        Args:
            uses_nccl: as in `Engine`.
            has_device: whether the script has chosen its GPU, or does so later.

        Raises:
            LaunchError: the ranks could not meet, or share a GPU that NCCL gives to one only.
        """
        if self._session is None:
            self._uses_nccl, self.pins_device = uses_nccl, uses_nccl and not has_device
            session = Session(self._options)
            session.start(self)
            self._session = session
            self.attach_session(session)
        return self._session

    def attach_session(self, session: Session) -> None:
        """Watch a session that has begun, and end it with the script."""
        if session not in self._begun:
            self._begun.append(session)
        self.watch.begin(session.activity)

    def stop(self, wait: bool) -> None:
        if wait and self._session is not None:
            self._shut_down()
            self._session.wait_for_others()
            self._close_groups()

    def end(self, error: BaseException | None = None) -> None:
        """End all sessions as all ranks do, or after an error without them; nothing in a fork of the rank.

        Args:
            error: by which the script has ended; `SystemExit` may be no failure.

        Raises:
            PeerError, SystemExit: as in `Session.end`.
        """
        if not self.is_in_charge:
            return
        self.watch.close()
        begun, self._begun = self._begun, []
        failure = None if isinstance(error, SystemExit) and error.code in (None, 0) else error
        for session in begun:
            if failure is not None:
                phase = phase_raised_in(failure)
                # The watch may have looked last when an exchange was under way that is over now.
                if COLLECTIVE in (phase, session.activity.phase):
                    session.activity.phase = phase
            session.ending = "" if error is None else _describe(error)
            session.end(failure)


def _describe(leaving: BaseException) -> str:
    """Return how and where a script has left by `exit`."""
    frames = traceback.extract_tb(leaving.__traceback__)
    places = [frame for frame in frames if "_sitebuiltins" not in frame.filename]  # which has `exit`
    return f" in {places[-1].filename}, line {places[-1].lineno} ({places[-1].line})" if places else ""
