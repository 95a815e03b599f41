"""The watch of every rank but 0: one line, to rank 0."""

from __future__ import annotations

import json
import selectors
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch.distributed as dist

from hvd_trainer.errors import LaunchError, first_line
from hvd_trainer.faults import failure_report, stack_dump
from hvd_trainer.faults.channel import Channel
from hvd_trainer.faults.failure_report import reporter
from hvd_trainer.faults.monitor import GONE, GRACE_S, SETTLE_S, STACKS_S, Monitor
from hvd_trainer.faults.root_cause import Heartbeat, RootCause


class MonitorClient(Monitor):
    """The watch of one of the others."""

    def connect(self, store: dist.Store, address: str) -> None:
        host, port, token = json.loads(store.get("watch"))
        try:
            connection = socket.create_connection((host, port), timeout=self.startup_s)
        except OSError as error:
            raise LaunchError(
                f"{self.world} could not reach rank 0 at {host}, port {port}: {first_line(error)}. A firewall "
                f"may stand between the nodes, or rank 0 has ended."
            ) from error
        connection.settimeout(STACKS_S)
        self._token = token
        self._line = Channel(connection)
        self._line.send({"token": token, "rank": self.world.rank})
        self._heard = time.monotonic()
        self._lost_at: float | None = None
        self._parted = False
        self._silent: list[int] = []
        self.selector.register(self._line, selectors.EVENT_READ, self._hear)

    def take(self, word: dict[str, Any]) -> None:
        self._parted = self._parted or word["kind"] == "done"
        self._line.send(word)

    def beat(self) -> None:
        self._line.send({"kind": "beat", "sign": asdict(self.own_sign())})

    def _hear(self) -> None:
        messages = self._line.receive()
        if messages is None:
            self.selector.unregister(self._line)
            self._line.close()
            self._lost_at = time.monotonic()
            return
        self._heard = time.monotonic()
        for message in messages:
            self._handle(message)

    def _handle(self, message: dict[str, Any]) -> None:
        match message["kind"]:
            case "stacks":
                self._silent = self.neighbours_among(message["silent"])
                for rank in [self.world.rank, *self._silent]:
                    self._line.send({"kind": "stacks", "of": rank, "text": self.stacks_of(rank)})
            case "end":
                self.kill(self._silent)
                self.decide(RootCause(**message["cause"]), message["ends_in_s"])
            case "bye":
                self._parted = True

    def look(self, now: float) -> None:
        if self.cause is not None or self._parted:
            return
        silent_s = now - self._heard
        settle_s = SETTLE_S if self.world.rank == 1 else GRACE_S
        if self._lost_at is not None and now - self._lost_at > settle_s:
            self._miss_rank_0(GONE, ())
        elif self._lost_at is None and silent_s > self.activity.silence_limit_s + STACKS_S:
            self._miss_rank_0(f"has not answered for {silent_s:.0f} s: it is stopped, or its machine is", (0,))

    def _miss_rank_0(self, what: str, silent: Sequence[int]) -> None:
        """Rank 1 tells of rank 0's failure, as far as it knows; who can acts for a silent rank 0."""
        self.end_for_sure()
        # Looked at before it is made to run on, to give its stacks. Where it is not seen from here, it was in the
        # step in which this rank waits for it.
        sign = self.last_seen(0) or Heartbeat(self.activity.step, "reduce")
        near = self.neighbours_among(silent)
        folder = failure_report.report_folder(self.log_folder, self._token)
        shown = ""
        if silent:
            failure_report.save_file(folder, f"rank-{self.world.rank}.txt", self.stacks_of(self.world.rank))
        for rank in near:
            shown = stack_dump.main_thread_section(text := self.stacks_of(rank))
            failure_report.save_file(folder, f"rank-{rank}.txt", text)
        found = self.failure_of(0, sign, what, detail=shown, folder=str(folder) if silent else "")
        if silent and self.world.rank == 1:
            failure_report.save_file(folder, "report.txt", found.text())
        tells = (self.world.rank == 1 or self._is_deputy()) and self.world.launcher != "run"
        if tells and not self.ended_from_outside(self._lost_at):
            reporter.report(found.text())
        self.kill(near)
        self.decide(RootCause(0, found.text(), tells or self.world.rank > 1), 0.2)

    def _is_deputy(self) -> bool:
        """Whether this is the first rank of another node: rank 0's may be gone with all its ranks."""
        hosts = [peer.host for peer in self.peers]
        here = hosts[self.world.rank]
        return here != hosts[0] and hosts.index(here) == self.world.rank

    def resumed(self, seconds: float) -> None:
        super().resumed(seconds)
        self._heard = time.monotonic()

    def is_deciding(self) -> bool:
        return self._lost_at is not None and not self._parted

    def part(self) -> bool:
        self._line.close()
        return True

    def retire(self) -> None:
        self._line.send({"kind": "done"})
        self._line.close()
