"""The monitor of every rank but 0: one channel, to rank 0's monitor."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence

import torch.distributed as dist

from hvd_trainer.errors import LaunchError, first_line
from hvd_trainer.faults import failure_report, stack_dump
from hvd_trainer.faults.failure_report import STALL, Failure, describe_rank, reporter
from hvd_trainer.faults.messages import (
    Alive,
    Bye,
    Channel,
    Done,
    JobEnded,
    Left,
    Message,
    RankEnded,
    StacksRequest,
)
from hvd_trainer.faults.monitor import (
    EXIT_GRACE_S,
    SETTLE_S,
    STACKS_TIMEOUT_S,
    Monitor,
    MonitorSettings,
)
from hvd_trainer.faults.root_cause import Heartbeat, RootCause
from hvd_trainer.rendezvous.endpoint import parse_endpoint
from hvd_trainer.utils.members import send_hello


class MonitorClient(Monitor):
    """The monitor of a rank other than 0; connects to rank 0's.

    Raises:
        LaunchError: rank 0's monitor cannot be reached.
    """

    def __init__(self, settings: MonitorSettings, store: dist.Store) -> None:
        super().__init__(settings)
        server = parse_endpoint(store.get("monitor").decode())
        self._token = server.token
        try:
            connection = socket.create_connection((server.host, server.port), timeout=settings.startup_s)
            send_hello(connection, self._token, self.world.rank)
        except OSError as error:
            raise LaunchError(
                f"{self.world} could not reach rank 0 at {server.netloc}: {first_line(error)}. A firewall "
                f"may stand between the nodes, or rank 0 has ended."
            ) from error
        connection.settimeout(STACKS_TIMEOUT_S)
        self.add_channel(0, Channel(connection))
        self._lost_at: float | None = None
        self._may_disconnect = False
        """whether rank 0 has disconnected on purpose: the channel's end is no failure"""
        self._line = ""
        """of the user's own code where this rank has failed"""
        self._silent: list[int] = []
        """the silent ranks of this machine that this rank acts for"""

    def send_heartbeat(self) -> None:
        self.broadcast(Alive(heartbeat=self.own_heartbeat()))

    def handle_loss(self, rank: int) -> None:
        self._lost_at = time.monotonic()

    def handle(self, rank: int, message: Message) -> None:
        if rank == self.world.rank:
            if isinstance(message, RankEnded):
                self._line = message.line
            self.broadcast(message)
            return
        match message:
            case StacksRequest(silent=silent):
                self._silent = self.local_ranks.silent_neighbours(silent)
                for stacks in self.answers([self.world.rank, *self._silent]):
                    self.broadcast(stacks)
            case JobEnded(cause=cause, exit_in_s=exit_in_s):
                if not self.activity.reports_only:
                    self.local_ranks.kill(self._silent)
                self.end_job(cause, exit_in_s)
            case Left():
                self.everyone_left.set()
            case Done():
                self.done[message.rank] = message
            case Bye():
                self._may_disconnect = True
                self.everyone_is_done.set()

    def check(self, now: float) -> None:
        if self.cause is not None or self._may_disconnect:
            return
        silent_s = now - self.last_message[0]
        settle_s = SETTLE_S if self.world.rank == 1 else EXIT_GRACE_S
        if self._lost_at is not None and now - self._lost_at > settle_s:
            self._report_rank_0(*self.local_ranks.ending(0))
        elif self._lost_at is None and silent_s > self.activity.silence_limit_s + STACKS_TIMEOUT_S:
            what = f"has not answered for {silent_s:.0f} s: it is stopped, or its machine is"
            self._report_rank_0(what, silent=(0,))

    def _report_rank_0(self, what: str, detail: str = "", silent: Sequence[int] = ()) -> None:
        """End the job because of rank 0, or only say that it is silent; rank 1 prints the report.

        Args:
            what: happened to rank 0.
            detail: its stack, if a signal has ended it.
            silent: rank 0 if it is silent, none if it is gone.
        """
        goes_on = bool(silent) and self.activity.reports_only
        if goes_on and (self.has_reported_stall or self.world.rank != 1):
            return
        if not goes_on:
            self.exit_even_if_blocked()
        # Read before rank 0 is made to run on in order to give its stacks. If it is on another machine, take the
        # step in which this rank waits for it.
        heartbeat = self.local_ranks.last_status(0) or Heartbeat(self.activity.step, "collective")
        neighbours = self.local_ranks.silent_neighbours(silent)
        folder = failure_report.report_folder(self.log_folder, self._token)
        own, *others = self.answers([self.world.rank, *neighbours])
        stacks = {answer.rank: answer.text for answer in (own, *others)}
        failure = Failure(
            title=STALL if goes_on else "failure",
            rank=0,
            peers=self.peers,
            heartbeat=heartbeat,
            what=what,
            detail=detail or stack_dump.training_section(stacks.get(0, ""), self.peers[0].thread),
            others=[
                describe_rank(
                    self.world.rank, self.own_heartbeat(), {self.world.rank: own.calls}, self._line or own.line
                )
            ],
            folder=str(folder) if silent else "",
        )
        if silent:
            failure_report.save_stacks(folder, stacks, failure.text() if self.world.rank == 1 else None)
        if goes_on:
            self.has_reported_stall = True
            reporter.write(failure.text())
            return
        reports = (self.world.rank == 1 or self._is_deputy()) and not reporter.parent_reports
        if reports and not self.was_terminated_before(self._lost_at):
            reporter.report(failure.text())
        self.local_ranks.kill(neighbours)
        self.end_job(RootCause(0, failure.text(), reported=reports or self.world.rank > 1), 0.2)

    def _is_deputy(self) -> bool:
        """Return True for the first rank of another node: rank 0's may be gone with all its ranks."""
        hosts = [peer.host for peer in self.peers]
        own = hosts[self.world.rank]
        return own != hosts[0] and hosts.index(own) == self.world.rank

    def is_deciding(self) -> bool:
        return self._lost_at is not None and not self._may_disconnect

    def disconnect(self) -> None:
        self.broadcast(Done(rank=self.world.rank))
        self.close_channels()

    def disconnect_if_done(self) -> bool:
        self.close_channels()
        return True
