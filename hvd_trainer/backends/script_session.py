"""The session of a script that knows nothing of it: from the first start of an engine to the script's end.

The `Trainer` tells the monitor what it is doing. A script does not, so a thread looks where its main thread is.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from types import CodeType, FrameType, ModuleType

import torch.distributed as dist

from hvd_trainer.backends.session import Session
from hvd_trainer.config.options import EngineOptions
from hvd_trainer.errors import LaunchError
from hvd_trainer.faults.activity import EXCHANGE, Activity

LOOK_EVERY_S = 1.0
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
"""Phase of a rank by the folder of the code that it runs. Elsewhere it runs the user's code."""
USERS_CODE = "callback"


class ScriptSession:
    """Starts a session when the script starts its engine, and ends it with the script.

    Args:
        options: of the engine; devices and threads are left to the script, where it chooses them.
        timeout_s: how long a rank may stay at one place before that is a stall, in seconds.
    """

    def __init__(self, options: EngineOptions, *, timeout_s: float) -> None:
        self._options, self._timeout_s = options, timeout_s
        self._session: Session | None = None
        self._engine: ModuleType | None = None
        self._activity: Activity | None = None
        self._pid = os.getpid()

    @property
    def is_own_process(self) -> bool:
        """Whether this process is the rank, and not one that the script has started or forked."""
        return os.getpid() == self._pid

    @property
    def has_started(self) -> bool:
        """Whether the script has started an engine."""
        return self._session is not None or self._engine is not None

    def attach(self, engine: ModuleType) -> None:
        """Watch the sessions that an engine starts by itself, and end it with the script.

        Args:
            engine: has `call_at_start`, `shutdown` and `fail` as `hvd.common.basics` has.
        """
        self._engine = engine
        engine.call_at_start(self._watch)

    def start(self, *, uses_nccl: bool = False) -> Session:
        """Return the session; meet the other ranks if this is the first call. A collective then.

        Raises:
            LaunchError: the ranks could not meet, or share a GPU that NCCL gives to one only.
        """
        if self._session is None:
            self._session = session = Session(self._options)
            session.connect()
            if uses_nccl:
                session.prepare_nccl()
            session.begin_monitoring()
            self._watch(session)
        return self._session

    def _watch(self, session: Session) -> None:
        """Limit how long the rank may stay at one place of the script from now on."""
        is_first, self._activity = self._activity is None, session.activity
        session.activity.limits = self._timeout_s, self._timeout_s
        if is_first:
            threading.Thread(target=self._watch_main_thread, name="watch", daemon=True).start()

    def _watch_main_thread(self) -> None:
        """Tell the activity of each change of the main thread's place."""
        main = threading.main_thread().ident or 0
        last: list[tuple[CodeType, int]] = []
        while True:
            frame = sys._current_frames().get(main)
            stack = [frame for frame, _ in traceback.walk_stack(frame)]
            place = [(frame.f_code, frame.f_lasti) for frame in stack]
            if place != last and self._activity is not None:
                last = place
                self._activity.enter(phase_of(reversed(stack)))
            del frame, stack
            time.sleep(LOOK_EVERY_S)

    def count_step(self) -> None:
        """Count a completed optimizer step."""
        if self._activity is not None:
            self._activity.step += 1

    def finish(self) -> None:
        """End as all ranks do, and wait until all have come to their end."""
        if self._engine is not None:
            self._engine.shutdown()
        session, self._session = self._session, None
        if session is None:
            return
        session.finish()
        if session.world.size > 1:
            if session.store.add("script/ended", 1) == session.world.size:
                session.store.set("script/all_ended", "")
            while not session.store.check(["script/all_ended"]):
                time.sleep(LOOK_EVERY_S / 20)
        session.close()

    def fail(self, error: BaseException) -> None:
        """End after an error; raise another one in its place if it only follows from another rank's.

        Raises:
            PeerError: another rank is to blame.
            SystemExit: this rank has left by it, and the monitor has reported that.
        """
        if self._engine is not None:
            self._engine.fail(error)
        session, self._session = self._session, None
        if session is None:
            return
        if phase_of(frame for frame, _ in traceback.walk_tb(error.__traceback__)) == EXCHANGE:
            session.activity.phase = EXCHANGE
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


def phase_of(frames: Iterator[FrameType]) -> str:
    """Return the phase by the innermost frame, the last one, whose code's folder tells."""
    phase = USERS_CODE
    for frame in frames:
        file = frame.f_code.co_filename
        phase = next((phase for folder, phase in PHASES.items() if folder in file), phase)
    return phase
