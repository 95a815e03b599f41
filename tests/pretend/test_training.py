"""Ways to train on the pretend device: streams in any order give the same bits, and the host waits for none."""

from __future__ import annotations

from pathlib import Path

import pytest
from combinations import case
from gpu import table
from launchers import run_ranks

from pretend import build, checks

pytestmark = [
    pytest.mark.skipif(build.missing() is not None, reason=str(build.missing())),
]
LATE = ("blocking", "late side streams")
ALL = (*LATE, "late default stream", "as queued")
SHORT = ("plain", "fp16", "fp16 on the wire", "uneven last batches", "loader processes")
"""Rows for the engine whose other rows are `nightly`."""
TEXTS = {
    **{name: text.replace("--max-steps 5", "") for name, text in table.TEXTS.items()},
    "several devices": "--backend ddp --devices-per-rank 2",
}


@pytest.mark.parametrize(
    ("engine", "names", "orders"),
    [
        case("ddp", None, LATE),
        case("horovod", SHORT, LATE),
        case("ddp", None, ALL, when="nightly"),
        case("horovod", None, ALL, when="nightly"),
    ],
)
def test_order_of_streams_changes_no_bit(
    engine: str, names: tuple[str, ...] | None, orders: tuple[str, ...], tmp_path: Path
) -> None:
    rows = checks.rows(engine)
    ways = {name: f"{checks.DIGITS} --backend {engine} {rows[name]}" for name in names or rows}
    args = ("mnist", list(ways.values()), str(tmp_path), orders)
    digests = run_ranks(checks.same_bits, num_processes=2, args=args, timeout_s=550)[0]
    # Buckets of both engines are summed in one order, and clipping at 1 000 changes nothing.
    assert digests[ways["plain"]] == PLAIN.setdefault("digest", digests[ways["plain"]])


PLAIN: dict[str, str] = {}
"""What any engine trains in the plain way."""


def test_texts_in_stages_shards_and_on_several_devices(tmp_path: Path) -> None:
    two = [f"{checks.TEXTS} {text}" for name, text in TEXTS.items() if name != "several devices"]
    run_ranks(checks.same_bits, num_processes=2, args=("imdb", two, str(tmp_path), LATE), timeout_s=300)
    one = [f"{checks.TEXTS} {TEXTS['several devices']}"]
    run_ranks(checks.same_bits, num_processes=1, args=("imdb", one, str(tmp_path / "one"), LATE), timeout_s=300)


@pytest.mark.parametrize("engine", [case("ddp"), case("horovod", when="long")])
def test_host_waits_for_no_step(engine: str) -> None:
    texts = [*table.NO_WAITS.values(), "--batch-size 32 --chunks 2 --max-norm 1"]
    run_ranks(checks.host_waits, num_processes=2, args=(engine, texts), timeout_s=300)


@pytest.mark.parametrize("engine", [case("ddp"), case("horovod", when="long")])
def test_checkpoint_is_what_the_device_had(engine: str, tmp_path: Path) -> None:
    args = (f"--backend {engine}", str(tmp_path), "late default stream")
    run_ranks(checks.resume, num_processes=2, args=args, timeout_s=200)


def test_generators_are_those_of_the_device() -> None:
    run_ranks(checks.generators, num_processes=1)
