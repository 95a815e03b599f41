"""What the watches of all ranks have in common: a thread, what it is told, and how it ends a rank."""

from __future__ import annotations

import logging
import os
import queue
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any, NoReturn

import torch.distributed as dist

from hvd_trainer.errors import UserError, first_line
from hvd_trainer.faults import failure_report, stack_dump
from hvd_trainer.faults.activity import END, Activity
from hvd_trainer.faults.failure_report import CRASH_EXIT_CODE, Failure, reporter
from hvd_trainer.faults.root_cause import Heartbeat, RootCause
from hvd_trainer.faults.shared_status import SharedStatus
from hvd_trainer.launch.world import World
from hvd_trainer.rendezvous.ranks import RankInfo
from hvd_trainer.utils.network import LOOPBACK, shut_down_connections
from hvd_trainer.utils.process import start_time

logger = logging.getLogger(__name__)

BEAT_S = 1.0
SETTLE_S = 0.3
"""How long the cause may come after its consequences: the break of a rank's line after that of its exchanges."""
PAUSE_S = 5.0
"""When this thread had no turn for longer, the whole process had none: it was stopped by Ctrl-Z, say."""
STACKS_S = stack_dump.ANSWER_S + 2
GRACE_S = 3.0
"""What a rank is given to end by itself, or by its launcher."""
LAUNCHERS_THAT_STAY = ("horovodrun", "torchrun", "mpirun", "mpiexec", "run")
"""Whose ranks are their children, directly or not, until the job ends."""
GONE = "ended without a word, as by kill -9, by os._exit, or because memory ran out"


class Monitor(ABC):
    """The watch of one rank.

    Args:
        world, peers: who there is.
        activity: what this rank is doing.
        startup_s: how long connecting may take, in seconds.
        environ: the environment.
        goes_on_s: where ranks go on without one that has failed, how long they may take to notice, in seconds;
            None: they end with it.
        abort_exchanges: ends what a device exchanges with a rank that is gone; may block, and is called then only.

    Attributes:
        log_folder: the run's log folder, once that is known: stacks are kept there.
        cause: what has been decided.
    """

    def __init__(
        self,
        world: World,
        peers: Sequence[RankInfo],
        activity: Activity,
        *,
        startup_s: float,
        environ: Mapping[str, str],
        elastic_timeout_s: float | None = None,
        abort_exchanges: Callable[[], None] = lambda: None,
    ) -> None:
        self.elastic_timeout_s, self._abort_exchanges = elastic_timeout_s, abort_exchanges
        self.world, self.peers, self.activity = world, peers, activity
        self.log_folder: str | None = None
        self.cause: RootCause | None = None
        self.startup_s, self._environ = startup_s, environ
        self._decided = threading.Event()
        self._closing = False
        self._words: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.selector = selectors.DefaultSelector()
        self._woken, self._wake = socket.socketpair()
        self.selector.register(self._woken, selectors.EVENT_READ, self._take_words)
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._parent = os.getppid() if world.launcher in LAUNCHERS_THAT_STAY else None
        self._turn = self._beaten = time.monotonic()
        self._ends_at: float | None = None
        self._hangs_up_at: float | None = None
        self._for_sure: threading.Timer | None = None
        self.terminated_at: float | None = None

    # What the main thread calls.

    def start(self, store: dist.Store, address: str) -> None:
        """Connects the ranks; all call it.

        Args:
            store: where rank 0 says how to reach it.
            address: of this rank, at which rank 0 listens.
        """
        self._pages = {
            rank: page
            for rank, peer in enumerate(self.peers)
            if self._is_here(rank)
            and peer.status_fd is not None
            and (page := SharedStatus.open(peer.pid, peer.status_fd)) is not None
        }
        self.connect(store, address)
        self._thread.start()

    def report_done(self) -> None:
        """This rank has come to its end, and waits for the others'."""
        self.activity.enter(END)
        self._say({"kind": "done"})

    def report_error(self, error: BaseException) -> RootCause | None:
        """Says why this rank fails, and waits to hear which rank's failure it is; None if nobody tells."""
        self._say(self._word(error))
        if not isinstance(error, KeyboardInterrupt):
            self._decided.wait(2 * GRACE_S)
        return self.cause

    def finish_report(self) -> None:
        """This process is being ended from outside; returns when a report that is under way has been printed."""
        self.terminated_at = time.monotonic()
        if not self._decided.wait(0.05) and self.is_deciding():
            self._decided.wait(STACKS_S)

    def close(self) -> None:
        """Ends the watch over this rank."""
        self._say({"kind": "close"})
        self._thread.join(2 * GRACE_S)
        if self._for_sure is not None:
            self._for_sure.cancel()
        self.selector.close()
        self._wake.close()
        self._woken.close()
        for page in self._pages.values():
            page.close()

    def _say(self, word: dict[str, Any]) -> None:
        self._words.put(word)
        self._wake.send(b"!")

    def _word(self, error: BaseException) -> dict[str, Any]:
        kind, detail = "raised", ""
        text = "".join(traceback.format_exception_only(error)).strip()
        if isinstance(error, KeyboardInterrupt):
            kind, text = "interrupted", "was interrupted"
        elif isinstance(error, SystemExit):
            kind, text = "left", f"called sys.exit({error.code}), and other ranks have not come to their end"
        elif isinstance(error, UserError):
            text = first_line(error)
        elif reporter.prints_tracebacks:
            text, detail = "raised an exception", "".join(traceback.format_exception(error))
        activity = self.activity
        return {
            "kind": kind,
            "text": text,
            "detail": detail,
            "in_exchange": activity.in_exchange,
            "user": isinstance(error, UserError),
            "sign": asdict(self.own_sign()),
        }

    # The thread.

    @abstractmethod
    def connect(self, store: dist.Store, address: str) -> None:
        """Makes the lines."""

    @abstractmethod
    def take(self, word: dict[str, Any]) -> None:
        """A word of this rank's own."""

    @abstractmethod
    def beat(self) -> None:
        """Tells the others that this rank is there."""

    @abstractmethod
    def look(self, now: float) -> None:
        """Decides what there is to decide; called often."""

    @abstractmethod
    def retire(self) -> None:
        """Closes the lines in such a way that nobody takes it for an end."""

    @abstractmethod
    def is_deciding(self) -> bool:
        """Whether something has happened that is yet to be told."""

    @abstractmethod
    def part(self) -> bool:
        """Closes the lines; False as long as they are needed."""

    def _run(self) -> None:
        try:
            self._keep_watch()
        except Exception:
            traceback.print_exc()
            if self.cause is not None:
                os._exit(CRASH_EXIT_CODE)  # the job ends, and nobody else would see to it that this rank does
            logger.error("The watch over the ranks has failed, and training goes on without it.")
            self.retire()

    def _keep_watch(self) -> None:
        while True:
            for key, _ in self.selector.select(BEAT_S / 4):
                key.data()
            now = time.monotonic()
            if now - self._turn > PAUSE_S:
                self.resumed(now - self._turn)
            self._turn = now
            self._miss_the_launcher()
            if now - self._beaten >= BEAT_S:
                self._beaten = now
                self.beat()
            self.look(now)
            if self._closing and self.part():
                return
            self._wait_no_longer(now)
            if self._ends_at is not None and now >= self._ends_at:
                self._end()

    def _wait_no_longer(self, now: float) -> None:
        """Ends an exchange with a rank that failed and that nobody has ended: its host may be gone.

        In no other phase: a connection with that host may then be the user's own.
        """
        if self._hangs_up_at is None or now < self._hangs_up_at or self.cause is None:
            return
        if not (self.activity.is_waiting or self.activity.in_exchange):
            return
        self._hangs_up_at = None
        there = self.peers[self.cause.rank].address
        if there not in (LOOPBACK, self.peers[self.world.rank].address):
            shut_down_connections(there)

    def _end(self) -> NoReturn:
        """Ends this process, which has not left by itself; says why, where others go on."""
        cause = self.cause
        if self.elastic_timeout_s is not None and cause is not None and cause.rank != self.world.rank:
            where = failure_report.describe_position(self.activity.step, self.activity.phase)
            text = (
                f"{self.world} is ended: {self.elastic_timeout_s:g} s after rank {cause.rank} failed it has not "
                f"left ({where}). If it may take so long, raise --startup-timeout-s\n"
            )
            with suppress(OSError):
                os.write(2, text.encode())
        os._exit(CRASH_EXIT_CODE)

    def _take_words(self) -> None:
        self._woken.recv(1 << 12)
        while not self._words.empty():
            word = self._words.get()
            if word["kind"] == "close":
                self._closing = True
            else:
                self.take(word)

    def _miss_the_launcher(self) -> None:
        if self._parent is not None and os.getppid() != self._parent:
            self._parent = None
            self.take({"kind": "orphaned", "text": f"its launcher, {self.world.launcher}, has ended"})

    def resumed(self, seconds: float) -> None:
        """This process has been stopped for so long: that does not count."""
        self.activity.since += seconds

    def own_sign(self) -> Heartbeat:
        """What this rank says of itself."""
        activity = self.activity
        seconds = time.monotonic() - activity.since
        limit_s = None if _is_debugged() else activity.limit_s
        return Heartbeat(activity.step, activity.phase, seconds, activity.is_waiting, limit_s)

    def last_seen(self, rank: int) -> Heartbeat | None:
        """Where a rank of this machine is, or was when it ended; None for others."""
        page = self._pages.get(rank)
        return None if page is None else Heartbeat(*page.read())

    def ended_from_outside(self, event: float | None) -> bool:
        """Whether all ranks were being ended before something happened to one, so that it is no failure."""
        return self.terminated_at is not None and self.terminated_at < (event or 0.0) - SETTLE_S / 2

    def end_for_sure(self) -> None:
        """Ends this process soon, also if the report cannot be written: the disk may be what all wait for."""
        self._for_sure = threading.Timer(
            max(2 * GRACE_S, self.elastic_timeout_s or 0), os._exit, (CRASH_EXIT_CODE,)
        )
        self._for_sure.daemon = True
        self._for_sure.start()

    def decide(self, cause: RootCause, ends_in_s: float) -> None:
        """The job ends, and this process in so many seconds, if it has not left by then."""
        self.cause = cause
        if self.elastic_timeout_s is not None and cause.rank != self.world.rank:
            ends_in_s = self.elastic_timeout_s
            self._hangs_up_at = time.monotonic() + GRACE_S
            threading.Thread(target=self._abort_exchanges, name="abort", daemon=True).start()
        if cause.reported:
            reporter.has_reported = True
        if cause.rank == self.world.rank:
            failure_report.write_torchrun_error(cause.text, self._environ)
        self._decided.set()
        self._ends_at = time.monotonic() + ends_in_s

    def failure_of(self, rank: int, sign: Heartbeat, what: str, **more: Any) -> Failure:
        """The report on a rank."""
        peer = self.peers[rank]
        return Failure(
            rank=rank,
            size=self.world.size,
            host=peer.host,
            process=peer.pid,
            step=sign.step,
            phase=sign.phase,
            what=what,
            **more,
        )

    # Ranks that do not answer.

    def neighbours_among(self, silent: Sequence[int]) -> list[int]:
        """The silent ranks of this machine, where this rank is the one to act for them: the first that can."""
        here = [rank for rank in range(self.world.size) if self._is_here(rank)]
        acting = next((rank for rank in here if rank not in silent), None)
        return [rank for rank in here if rank in silent] if acting == self.world.rank else []

    def _is_here(self, rank: int) -> bool:
        """Whether that rank's process can be seen, and is the one that it says."""
        peer = self.peers[rank]
        if peer.host != self.peers[self.world.rank].host:
            return False
        try:
            return start_time(peer.pid) == peer.start_time
        except OSError:
            return False

    def stacks_of(self, rank: int) -> str:
        """The stacks of this rank, or of a silent neighbour."""
        if rank == self.world.rank:
            return stack_dump.own_stacks()
        peer = self.peers[rank]
        return "" if peer.stacks_fd is None else stack_dump.request_stacks(peer.pid, peer.stacks_fd)

    def kill(self, ranks: Sequence[int]) -> None:
        """Ends neighbours that cannot end by themselves."""
        for rank in ranks:
            with suppress(OSError):
                os.kill(self.peers[rank].pid, signal.SIGKILL)


def _is_debugged() -> bool:
    """Whether somebody goes through the main thread by pdb, which takes as long as it takes."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return frame is not None and frame.f_trace is not None
