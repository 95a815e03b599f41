"""Ways to train on the pretend device: streams in any order give the same bits."""

from __future__ import annotations

from pathlib import Path

import device_checks
import pytest
from combinations import case
from ways_to_train import DIGITS, TEXTS, TWO_RANKS_OF_TEXTS, needs_cuda, two_ranks

from pretend.ranks import run_ranks

LATE = ("blocking", "late side streams")
ALL = (*LATE, "late default stream", "as queued")
SHORT = ("plain", "fp16", "fp16 on the wire", "uneven last batches", "loader processes")
"""Rows that each push trains."""
PLAIN: dict[int, str] = {}
"""Digests of the weights of the row `plain` by number of ranks: the same on both engines."""


@pytest.mark.parametrize(
    ("engine", "names", "orders", "ranks"),
    [
        case("single", ("plain", "fp16", "clipped", "evaluated inside an epoch"), LATE, 1),
        case("ddp", SHORT, LATE, 3),
        case("horovod", SHORT, LATE, 3),
        case("ddp", None, ALL, 2, when="long"),
        case("horovod", None, ALL, 2, when="long"),
        case("ddp", SHORT, LATE, 4, when="long"),
        case("horovod", SHORT, LATE, 4, when="long"),
    ],
)
def test_order_of_streams_changes_no_bit(
    engine: str, names: tuple[str, ...] | None, orders: tuple[str, ...], ranks: int, tmp_path: Path
) -> None:
    rows = {name: text for name, text in two_ranks(engine).items() if not needs_cuda(text)}
    ways = {name: f"{DIGITS} --backend {engine} {rows[name]}" for name in names or rows}
    args = ("mnist", list(ways.values()), str(tmp_path), orders)
    digests = run_ranks(device_checks.same_bits, num_processes=ranks, args=args, timeout_s=550)[0]
    # Buckets of both engines are summed in one order, and clipping at 1 000 changes nothing.
    assert digests[ways["plain"]] == PLAIN.setdefault(ranks, digests[ways["plain"]])


def test_texts_in_stages_and_shards(tmp_path: Path) -> None:
    ways = [f"{TEXTS} --backend {engine} {way}" for engine, way in TWO_RANKS_OF_TEXTS]
    args = ("imdb", ways, str(tmp_path), LATE)
    run_ranks(device_checks.same_bits, num_processes=2, args=args, timeout_s=300)
