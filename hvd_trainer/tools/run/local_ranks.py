"""Start the ranks of a script on this machine, and end all of them when one fails."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence

import psutil

from hvd_trainer.faults.failure_report import GRACE_S
from hvd_trainer.launch.launchers import without_ranks
from hvd_trainer.measure.start import exit_on_signals
from hvd_trainer.rendezvous.store_client import local_store, rank_environment
from hvd_trainer.tools.run.descendants import Orphans, end_processes
from hvd_trainer.training.job import MESSAGE_GRACE_S, USER_ERROR
from hvd_trainer.utils.network import LOOPBACK, listen

POLL_S = 0.02


def meeting_address() -> dict[str, str]:
    """Return torchrun's variables for an address of this machine that is free, where ranks meet by themselves.

    Scripts read them: they make an address or a store of their own of them, and RPC meets there.
    """
    with listen(LOOPBACK, 0) as listener:
        return {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(listener.getsockname()[1])}


def run_ranks(command: Sequence[str], size: int, *, is_guard: bool = False) -> int:
    """Run a command in each of `size` ranks, and return the exit code of the rank that failed first, or 0.

    A rank that a signal has ended counts as 128 plus the signal's number. When this process is interrupted or
    terminated, it ends the ranks.

    Args:
        is_guard: whether this process is that of `run_guarded`, and so ends what the ranks have left, too.
    """
    with exit_on_signals(), local_store() as endpoint:
        ranks: list[psutil.Popen] = []
        server = {child.pid for child in psutil.Process().children()}
        orphans = None
        own = without_ranks(os.environ) | meeting_address()
        try:
            for rank in range(size):
                environ = own | rank_environment(rank, size, endpoint)
                ranks.append(psutil.Popen(command, env=environ))
            if is_guard:
                orphans = Orphans(server | {rank.pid for rank in ranks})
            return _wait(ranks, orphans)
        finally:
            if is_guard:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it may come once more, when the command has ended
            end_processes(ranks)
            if orphans is not None:
                orphans.end()


def _wait(ranks: Sequence[psutil.Popen], orphans: Orphans | None) -> int:
    """Return once all ranks have ended, or one has failed and the others had the time to end by themselves."""
    while True:
        pids = orphans.list() if orphans is not None else ()
        codes: list[int | None] = [rank.poll() for rank in ranks]
        if orphans is not None and not any(code is not None for code in codes):
            orphans.spare_daemons(pids)
        failed = next((code for code in codes if code), None)
        if failed is not None:
            # After a mistake of the user's, which rank 0 has reported, the others wait to be ended.
            deadline = time.monotonic() + (MESSAGE_GRACE_S if failed == USER_ERROR else GRACE_S)
            while time.monotonic() < deadline and any(rank.poll() is None for rank in ranks):
                time.sleep(POLL_S)
            return failed if failed > 0 else 128 - failed
        if None not in codes:
            return 0
        time.sleep(POLL_S)
