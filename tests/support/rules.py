"""What is true on any device: a table of checks for tests/pretend, and for tests/gpu."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import device_checks
import stream_checks
from ways_to_train import DIGITS, NO_WAITS, TEXTS

LATE_SIDE, LATE_DEFAULT = "late side streams", "late default stream"
VERY_LATE = ("very late side streams", "very late default stream")
"""Later than a step takes: batches are fetched one step ahead."""
IN_ANY_ORDER = ((LATE_SIDE, LATE_DEFAULT, VERY_LATE[1]),)
FOLDER = "FOLDER"
"""Stands for an empty folder in the arguments of a check."""


class Rule(NamedTuple):
    """A check with its arguments.

    Args:
        ranks: in which it runs.
        engine: that it needs; empty: none.
        devices: that a rank must see.
    """

    check: Callable[..., Any]
    ranks: int
    args: tuple[Any, ...] = ()
    engine: str = ""
    devices: int = 1

    def in_folder(self, folder: Path) -> tuple[Any, ...]:
        """Return the arguments with a folder in place of `FOLDER`."""
        return tuple(it.replace(FOLDER, str(folder)) if isinstance(it, str) else it for it in self.args)


def cuts(engine: str) -> tuple[Any, ...]:
    """Return arguments for a model that is cut at either of two places."""
    ways = (f"{TEXTS} --backend {engine} --devices-per-rank 2 --balance {cut}" for cut in ("1,3", "3,1"))
    return "imdb", tuple(ways), FOLDER, ("blocking", LATE_SIDE)


SHARDS = ("--backend ddp --shard full", 0.75, "--backend ddp", None, 0.42)
WAY = f"{DIGITS} --backend single --batch-size 256 --max-steps 5"
FROM_HOST = ("mnist", (WAY,), FOLDER, ("blocking", *VERY_LATE))
CHUNKS = ("imdb", (f"{TEXTS} --backend ddp --chunks 2",), FOLDER, ("blocking", LATE_SIDE))
PARTS = ("--stages 2 --balance bytes --chunks 4", "--shard optimizer", "--shard full")
REPRODUCIBLE = ("--backend ddp --reproducible 2", 1.3, "--backend ddp", 2.0)
START = f"--backend ddp --log-dir {FOLDER} --save-every-steps 2"
RESUMED = (f"--backend ddp --log-dir {FOLDER} --max-steps 6 --resume auto", 1.1, START)
RULES = {
    "batches are copied beside the steps": Rule(stream_checks.copies_overlap, 2),
    "copies to the host are whole": Rule(stream_checks.moves_to_host_are_whole, 1),
    "a checkpoint is whole": Rule(stream_checks.copy_to_host_is_whole, 1, (FOLDER,)),
    "random numbers are those of the device": Rule(device_checks.generators, 1, devices=2),
    "numbers that are drawn": Rule(device_checks.drawn_numbers, 1, ("single",)),
    "batches are whole": Rule(device_checks.sent_from_host, 1, FROM_HOST),
    "texts in chunks": Rule(device_checks.same_bits, 2, CHUNKS),
    "a model on two devices": Rule(device_checks.same_bits_of_all, 1, cuts("ddp"), devices=2),
    "models on two devices each": Rule(device_checks.same_bits, 2, cuts("horovod"), engine="horovod", devices=4),
    "types of products": Rule(device_checks.precisions, 1, ("single",)),
    "an overflow of one stage": Rule(device_checks.overflow_of_one_stage, 2, ("ddp",)),
    "times of phases": Rule(stream_checks.times, 1),
    "results of collectives": Rule(stream_checks.results_are_waited_for, 2, ("ddp",)),
    "results of Horovod stay": Rule(stream_checks.results_stay, 1),
    "a device in an exchange": Rule(stream_checks.exchange_is_seen, 2, (FOLDER,)),
    "hvd": Rule(stream_checks.hvd_in_any_order, 2, IN_ANY_ORDER),
    "hvd: a rank that has joined": Rule(stream_checks.hvd_join, 2),
    "hvd: tensors that travel together": Rule(stream_checks.hvd_fuses, 2, devices=4),
    "hvd: process sets": Rule(stream_checks.hvd_process_sets, 3, devices=3),
    "hvd: process sets of four ranks": Rule(stream_checks.hvd_process_sets, 4, devices=4),
    "c10d": Rule(stream_checks.c10d_in_any_order, 2, IN_ANY_ORDER, engine="horovod"),
    **{
        f"host waits on {engine}: {name}": Rule(device_checks.host_waits, ranks, (engine, (way,)), engine=engine)
        for engine, ranks in (("single", 1), ("ddp", 2), ("horovod", 2))
        for name, way in NO_WAITS.items()
    },
    "host waits on ddp: parts": Rule(
        device_checks.host_waits, 2, ("ddp", tuple(f"--batch-size 32 {way}" for way in PARTS))
    ),
    "samples, and a rate on the device": Rule(device_checks.samples_and_rate, 1, ("single",)),
    **{
        f"resume on {engine}": Rule(
            device_checks.resume, 2, (f"--backend {engine}", FOLDER, LATE_DEFAULT), engine=engine
        )
        for engine in ("ddp", "horovod")
    },
    "abort on ddp": Rule(stream_checks.abort_ends_a_wait, 2, ("ddp", FOLDER)),
    "abort of hvd": Rule(stream_checks.abort_ends_a_wait, 2, ("hvd", FOLDER)),
    "memory of shards": Rule(device_checks.peak, 2, SHARDS),
    "memory of reproducible steps": Rule(device_checks.peak, 2, REPRODUCIBLE),
    "memory after a resume": Rule(device_checks.peak, 2, RESUMED),
}
