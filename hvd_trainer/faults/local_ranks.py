"""The ranks on this machine as processes: what they did last, their stacks, and how to kill one that hangs."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import suppress

from hvd_trainer.faults import stack_dump
from hvd_trainer.faults.root_cause import Heartbeat
from hvd_trainer.faults.shared_status import SharedStatus
from hvd_trainer.rendezvous.ranks import RankInfo
from hvd_trainer.utils.process import start_time

MAX_RECORD_BYTES = 1 << 20
ENDED_SILENTLY = "ended without a word, as by kill -9, by os._exit, or because memory ran out"


class LocalRanks:
    """The ranks whose processes this rank can see: it can read their status and signal them."""

    def __init__(self, rank: int, peers: Sequence[RankInfo]) -> None:
        self._rank, self._peers = rank, peers
        self._statuses = {
            other: status
            for other, peer in enumerate(peers)
            if self._is_local(other)
            and peer.status_fd is not None
            and (status := SharedStatus.open(peer.pid, peer.status_fd)) is not None
        }
        self._records: dict[int, int] = {}
        """descriptors of what faulthandler writes there: it outlives the rank"""
        for other in self._statuses:
            with suppress(OSError):
                path = f"/proc/{peers[other].pid}/fd/{peers[other].stacks_fd}"
                self._records[other] = os.open(path, os.O_RDONLY)

    def _is_local(self, rank: int) -> bool:
        """Return True if that rank's process is visible here, and is not another one that got its number since."""
        peer = self._peers[rank]
        if peer.host != self._peers[self._rank].host:
            return False
        try:
            return start_time(peer.pid) == peer.start_time
        except OSError:
            return False

    def last_status(self, rank: int) -> Heartbeat | None:
        """Return the step and phase of a local rank, also after its end; None for a rank elsewhere."""
        status = self._statuses.get(rank)
        return None if status is None else Heartbeat(*status.read())

    def ending(self, rank: int) -> tuple[str, str]:
        """Return how a rank has ended that is gone, and its stack if a fatal signal has ended it."""
        if rank in self._records:
            record = os.pread(self._records[rank], MAX_RECORD_BYTES, 0).decode(errors="replace")
            if name := stack_dump.fatal_signal(record):
                stack = stack_dump.training_section(record, self._peers[rank].thread)
                return f"was ended by {name}; its own output may say why", stack
        return ENDED_SILENTLY, ""

    def silent_neighbours(self, silent: Sequence[int]) -> list[int]:
        """Return the local ones of the silent ranks if this rank is the one to act for them, else nothing.

        The first local rank that is not silent acts, so that each silent one is signalled once.
        """
        local = [rank for rank in range(len(self._peers)) if self._is_local(rank)]
        acting = next((rank for rank in local if rank not in silent), None)
        return [rank for rank in local if rank in silent] if acting == self._rank else []

    def stacks_of(self, rank: int, *, resumes: bool = True) -> str:
        """Return the stacks of this rank or of a local one that is silent; empty if that does not answer.

        Args:
            resumes: as in `request_stacks`.
        """
        if rank == self._rank:
            return stack_dump.own_stacks()
        peer = self._peers[rank]
        return (
            "" if peer.stacks_fd is None else stack_dump.request_stacks(peer.pid, peer.stacks_fd, resumes=resumes)
        )

    def kill(self, ranks: Sequence[int]) -> None:
        """Kill local ranks that cannot end by themselves."""
        for rank in ranks:
            with suppress(OSError):
                os.kill(self._peers[rank].pid, signal.SIGKILL)

    def close(self) -> None:
        """Unmap the status of all ranks, and close their stacks."""
        for record in self._records.values():
            os.close(record)
        self._records.clear()
        for status in self._statuses.values():
            status.close()
