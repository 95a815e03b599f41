"""Estimate how far the clocks of other machines are ahead of rank 0's.

No rank leaves a barrier before all have entered it. So in each of a few barriers, with the clock of rank r being
ahead by x, what it enters at is before rank 0 leaves, and the other way round:

    rank 0      enters |=================| leaves          entered(r) - x  <  left(0)
    rank r         enters |===========| leaves             entered(0)      <  left(r) - x

Each barrier says of x that it lies between two numbers, and all together leave a range about as wide as an
exchange takes. Ranks on one machine have one clock.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from hvd_trainer.backends import Backend

BARRIERS = 20
Stamps = Sequence[tuple[int, int]]
"""When a rank entered and left each barrier, in nanoseconds."""


class Ahead(NamedTuple):
    """The offset of a rank's clock from rank 0's, with its uncertainty."""

    by_ns: int
    unsure_ns: int
    """The truth is no farther from it than this."""


def this_machine() -> str:
    """Return the identity of this clock: the kernel's boot id, which containers of one machine share."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


def compare_clocks(
    backend: Backend, machine: str | None = None, now: Callable[[], int] = time.time_ns
) -> list[Ahead]:
    """Return the clock offset of each rank. A collective: 20 barriers if there are several machines.

    Args:
        backend: the engine.
        machine: that of this rank; `this_machine()` if None.
        now: its clock.
    """
    machines = backend.collectives.all_gather_object(machine or this_machine())
    if len(set(machines)) == 1:
        return [Ahead(0, 0)] * len(machines)
    stamps = []
    for _ in range(BARRIERS):
        entered = now()
        backend.collectives.barrier()
        stamps.append((entered, now()))
    return ahead_of_first(machines, backend.collectives.all_gather_object(stamps))


def ahead_of_first(machines: Sequence[str], stamps: Sequence[Stamps]) -> list[Ahead]:
    """Compute the clock offset of each rank from the machines and barrier stamps of all ranks."""
    last_entered, first_left = {}, {}
    for machine in dict.fromkeys(machines):
        its = [stamps[rank] for rank, other in enumerate(machines) if other == machine]
        last_entered[machine] = [max(entered for entered, _ in barrier) for barrier in zip(*its, strict=True)]
        first_left[machine] = [min(left for _, left in barrier) for barrier in zip(*its, strict=True)]
    first = machines[0]
    found = {first: Ahead(0, 0)}
    for machine in last_entered.keys() - {first}:
        least = max(e - left for e, left in zip(last_entered[machine], first_left[first], strict=True))
        most = min(left - e for left, e in zip(first_left[machine], last_entered[first], strict=True))
        # A clock that was set meanwhile leaves nothing between them.
        found[machine] = Ahead((least + most) // 2, abs(most - least) // 2 + 1)
    return [found[machine] for machine in machines]
