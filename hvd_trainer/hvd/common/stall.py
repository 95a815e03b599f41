"""Says which ranks an operation waits for, once it has waited for long, and ends the job if asked to."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Collection, Sequence

import torch.distributed as dist

from hvd_trainer.hvd.common.exceptions import HorovodInternalError
from hvd_trainer.hvd.common.request import ranks_text
from hvd_trainer.hvd.common.settings import Settings

logger = logging.getLogger(__name__)

ANNOUNCE_S = 2.0
"""How long before the report a rank notes in the store that it waits; the ranks that have not are missing."""
MAX_NAMES = 5
"""How many operations a report names."""


class StallInspector:
    """Watches how long this rank has waited for others.

    Args:
        store: of the process set.
        ranks: global ranks of its members.
        settings: after how long to report, and to give up; 0: never.
    """

    def __init__(self, store: dist.Store, ranks: Sequence[int], rank: int, settings: Settings) -> None:
        self._store, self._ranks, self._rank = store, ranks, rank
        self._check_s, self._shutdown_s = settings.stall_check_s, settings.stall_shutdown_s
        self._due_s = min((limit for limit in (self._check_s, self._shutdown_s) if limit), default=math.inf)
        self._announced = self._reported = -1

    def check_round(self, number: int, began: float, names: Collection[str]) -> None:
        """Look at a round that some members have not come to.

        Args:
            number: of the round, the same on all members.
            began: when this rank came to it, by `time.monotonic`.
            names: the operations that this rank waits for.

        Raises:
            HorovodInternalError: it has waited for `shutdown_s`.
        """
        waited_s = time.monotonic() - began
        if waited_s < self._due_s - ANNOUNCE_S:
            return
        if self._announced != number:
            self._announced = number
            self._store.set(f"waiting {number} {self._rank}", "")
        if waited_s < self._due_s:
            return
        waiting = [rank for rank in self._ranks if self._store.check([f"waiting {number} {rank}"])]
        missing = [rank for rank in self._ranks if rank not in waiting]
        if missing:
            self._report(number, waited_s, names, waiting, missing)

    def check_operation(self, number: int, since: float, name: str, missing: Sequence[int]) -> None:
        """Look at an operation that some members have not asked for, although they wait for others.

        Args:
            number: of the round.
            since: when this rank asked for it.

        Raises:
            HorovodInternalError: as in `check_round`.
        """
        waited_s = time.monotonic() - since
        if waited_s >= self._due_s:
            waiting = [rank for rank in self._ranks if rank not in missing]
            self._report(number, waited_s, [name], waiting, missing)

    def _report(
        self, number: int, waited_s: float, names: Collection[str], waiting: Sequence[int], missing: Sequence[int]
    ) -> None:
        gives_up = self._shutdown_s and waited_s >= self._shutdown_s
        listed = [*names][:MAX_NAMES]
        rest = f" and {len(names) - len(listed)} more" if len(names) > len(listed) else ""
        text = (
            f"{ranks_text(waiting)} {'have' if len(waiting) > 1 else 'has'} waited for {waited_s:.0f} s for "
            f"{ranks_text(missing)} in {', '.join(listed)}{rest}."
        )
        is_due = self._check_s and waited_s >= self._check_s
        if is_due and self._reported != number and waiting[:1] == [self._rank]:
            self._reported = number
            logger.warning(
                "stall: %s Either ranks ask for different operations, or those are busy or hang "
                "(HOROVOD_STALL_CHECK_TIME_SECONDS=%g).",
                text,
                self._check_s,
            )
        if gives_up:
            raise HorovodInternalError(f"{text} HOROVOD_STALL_SHUTDOWN_TIME_SECONDS={self._shutdown_s:g} is over.")
